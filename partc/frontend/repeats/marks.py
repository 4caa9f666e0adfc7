"""Equal modules are traced once: the third and later calls of equal modules become marks that the reader expands.

    layers.0(x, cos)  -> traced between two marks: a record
    layers.1(y, cos)  -> equal to the record; traced as well, and compared with it when the graph is read
    layers.2(z, cos)  -> equal to the record; empty tensors and one mark

A call is equal to a record if the modules have equal trees of classes and weights, inputs and modes have equal types
and values, and every attribute that the recorded call read has an equal value. A call is recorded if it changes no
attribute and returns tensors and plain values. The time of a trace then depends on the number of distinct modules.

Two assumptions are checked in the finished graph: the second call of each kind computes the same as its record, and no
value inside a record is read outside it. If one fails, the model is traced again without this group of modules.
"""

from __future__ import annotations

import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partc.frontend.model_precision import modes
from partc.frontend.repeats.module_rows import ModuleRows, UnequalError, container_of
from partc.frontend.state.comparable import comparable_copy
from partc.installed import is_machinery
from partc.ir.program import MODULE_MARK
from partc.ir.repetitions import KEPT
from partc.replaced import replaced
from partc.torch_private import MODULE_CALL, TENSOR_HOOKS, TreeSpec, tree_flatten, tree_unflatten, without_overriding

RECORDS = 8  # the most records of a group; further calls are traced
DEPTH = 6  # nesting depth to which attribute values are compared
_PLAIN = (bool, int, float, str, bytes, complex, torch.dtype, torch.device, torch.Size, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
_KEPT_APART = ("_parameters", "_buffers", "_modules")
_library = torch.library.Library("partc", "FRAGMENT")
_library.define(f"{MODULE_MARK}(Tensor[] tensors, int call, str path) -> ()")
_library.impl(MODULE_MARK, lambda tensors, call, path: None, "CompositeExplicitAutograd")
for _key in ("Autograd", "ADInplaceOrView"):
    _library.impl(MODULE_MARK, torch.library.fallthrough_kernel, _key)
torch.fx.node.has_side_effect(torch.ops.partc.module_call.default)

Excluded = frozenset[int | str]  # groups of equal modules by number, and rows of modules by their container's path
Edge = tuple[torch.autograd.graph.Node, int]  # an output of a node of the autograd graph


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMark:
    """A marked call of a module: the call that recorded it, and whether its operations are traced.

    A traced call has two marks: one before its operations, which lists the input tensors, and one behind them, which
    lists the output tensors. A call that is not traced has one mark, which lists its inputs and then empty tensors in
    place of its outputs; `outputs` are their indices among the output tensors of the record. `weights` maps names of
    parameters and buffers of the recorded call to those of this call.
    """

    group: int
    record: int
    traced: bool
    inputs: int
    outputs: tuple[int, ...]
    weights: Mapping[str, str]


class _TensorKind(NamedTuple):
    """The properties of a tensor in which equal calls agree."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    trained: bool
    parameter: bool

    @classmethod
    def of(cls, x: Tensor) -> _TensorKind:
        return cls(x.dtype, tuple(x.shape), x.stride(), x.requires_grad, isinstance(x, nn.Parameter))


@dataclass(frozen=True, slots=True)
class _Given:
    """The inputs of a call: their tree, and its leaves as kinds of tensors, references to earlier leaves, or plain
    values.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]
    modes: tuple[Any, ...]


@dataclass(slots=True, kw_only=True)
class _Record:
    """A traced call that later calls are compared with."""

    number: int
    module: nn.Module
    path: str
    given: _Given
    reads: set[tuple[int, str]] = field(default_factory=set)
    values: list[dict[str, Any]] = field(default_factory=list)  # attribute -> value, for each part of the module
    spec: TreeSpec | None = None
    results: tuple[Any, ...] = ()  # an index of an input, the name of a weight, a kind of tensor, or a plain value
    reach: tuple[tuple[Any, ...], ...] = ()  # for each result: inputs, weights and other leaves with gradients
    usable: bool = False
    calls: int = 1
    identified: bool = False  # whether the call read the identity of a module


class ModuleTree:
    """The modules of a model by the identity of their `__dict__`, which torch.export's proxies of modules share.

    `constants` describe the values of buffers that the trace knows, by name: equal modules have equal ones.
    """

    def __init__(self, named: Mapping[str, nn.Module], constants: Mapping[str, Hashable]) -> None:
        self.named = named
        self.modules = {id(vars(module)): module for module in self.named.values()}
        self.paths = {id(vars(module)): path for path, module in self.named.items()}
        self.groups = dict(_grouped(self.named, constants))
        self.weights = _weights(named[""])


@dataclass(frozen=True, slots=True)
class _RowCall:
    """A call of a module in a row of equal ones: its record, its input tensors, and the leaves of its result."""

    path: str
    record: _Record
    inputs: list[Tensor]
    leaves: list[Any]
    spec: TreeSpec


class Repeats:
    """The calls of one trace of a model. `excluded` are groups of modules whose calls are all traced; None: all
    groups.

    `changing` collects the groups whose calls change attributes. Such calls are all traced, also in a later trace that
    finds the attributes changed already.
    """

    def __init__(self, modules: ModuleTree, excluded: Excluded | None, rows: ModuleRows, changing: set[int]) -> None:
        self.calls: dict[int, CallMark] = {}
        self.passed: dict[str, set[Hashable]] = {}  # by module: the Python values that calls of equal modules pass
        self.rows = rows
        self._rows = {path: (row, place) for row in rows.all for place, path in enumerate(chain(*row.units))}
        self._row_calls: dict[str, list[_RowCall]] = {container_of(row): [] for row in rows.all}
        self._excluded = excluded
        self._changing = changing
        self._groups = modules.groups
        self._paths = modules.paths
        self._modules = modules.modules
        self._weights = modules.weights
        # A module without an equal one is recorded only when it is called a second time.
        self._met = {group for group, count in Counter(modules.groups.values()).items() if count > 1}
        self._records: dict[int, list[_Record]] = {}
        self._active: list[_Record] = []
        self._inside: list[int] = []  # the marked calls that are running
        self._made: dict[int, tuple[Tensor, _Record, Sequence[Any], nn.Module, int]] = {}
        self._numbers = 0

    @property
    def whole(self) -> bool:
        """Whether all calls are traced."""
        return self._excluded is None

    def refuse_branch(self) -> None:
        """Raise UnequalError for a branch inside a marked call: copies of the call would repeat its outcome."""
        if self._inside:
            raise UnequalError(self.calls[self._inside[0]].group)

    def call(self) -> int:
        """The number of the innermost marked call that runs, -1 outside of them."""
        return self._inside[-1] if self._inside else -1

    def identity(self, x: Any, /) -> int:
        """Python's `id`, for the model's code. Calls that read the identity of a module or a weight are all traced: a
        table by identity may have different values for equal modules.
        """
        if isinstance(x, nn.Module | Tensor):
            for record in self._active:
                record.identified = True
        return id(x)

    @contextmanager
    def marking(self) -> Iterator[None]:
        """A context in which calls of modules are marked."""
        if self._excluded is None:
            yield
            return
        call = getattr(nn.Module, MODULE_CALL)

        def marked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._called(module, args, kwargs, lambda: call(module, *args, **kwargs))

        self.rows.running = True
        try:
            with replaced(nn.Module, **{MODULE_CALL: marked}):
                yield
        finally:
            self.rows.running = False
        for row in self.rows.all:
            if len(self._row_calls[container_of(row)]) != len(row.units) * len(row.units[0]):
                raise UnequalError(container_of(row))

    def _called(self, seen: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        group = self._groups.get(id(vars(seen)))
        if group is None or group in (self._excluded or ()):
            return run()
        if group not in self._met:
            self._met.add(group)
            return run()
        module = self._modules[id(vars(seen))]  # tracing hands out proxies of modules
        leaves, spec = tree_flatten((args, kwargs))
        given = _comparable_inputs(spec, leaves)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        path = self._paths[id(vars(seen))]
        if path not in self._rows:
            result, _ = self._run_recorded(module, group, given, tensors, run)
        elif (like := self._left_out(module, given, tensors)) is not None:
            self.passed[path] = self.passed[like.path]
            return tree_unflatten(like.leaves, like.spec)
        else:
            result = self._in_row(module, group, given, tensors, run)
        self.passed.setdefault(path, set()).add((_python_values(leaves), _python_values((args, kwargs, result))))
        return result

    def _run_recorded(
        self, module: nn.Module, group: int, given: _Given | None, tensors: list[Tensor], run: Callable[[], Any]
    ) -> tuple[Any, _Record | None]:
        """The result of a call, and its record if there is one."""
        if given is None or _hooked(module):
            return run(), None
        records = self._records.setdefault(group, [])
        record = next((found for found in records if self._equal(found, module, given)), None)
        if record is None and len(records) == RECORDS:
            return run(), None
        if record is None:
            return self._recorded(module, group, given, tensors, run), self._records[group][-1]
        record.calls += 1
        if record.calls == 2:
            return self._marked(record, module, group, tensors, run), record
        return self._repeated(record, module, group, tensors), record

    def _in_row(
        self, module: nn.Module, group: int, given: _Given | None, tensors: list[Tensor], run: Callable[[], Any]
    ) -> Any:
        """The result of a traced call in a row. Raises UnequalError if the row differs from its plan."""
        path = self._path(module)
        row, index = self._rows[path]
        calls, size = self._row_calls[container_of(row)], len(row.units[0])
        alike = index == len(calls)
        result, record = self._run_recorded(module, group, given, tensors, run)
        unit, place = divmod(index, size)
        if not alike or record is None or (unit > 1 and record is not calls[size + place].record):
            raise UnequalError(container_of(row))
        calls.append(_RowCall(path, record, tensors, *tree_flatten(result)))
        return result

    def _left_out(self, module: nn.Module, given: _Given | None, tensors: list[Tensor]) -> _RowCall | None:
        """For a call that the trace leaves out, the call of the third unit whose results it returns; None if it is
        traced.

        Raises UnequalError unless the row's modules are called one after the other like the third unit, each on the
        results of the one before.
        """
        row, index = self._rows[self._path(module)]
        calls, size = self._row_calls[container_of(row)], len(row.units[0])
        unit, place = divmod(index, size)
        if not KEPT <= unit < len(row.units) - 1:
            return None
        template = (KEPT - 1) * size + place
        like, before = calls[template], calls[template - 1]
        alike = index == len(calls) and given is not None and not _hooked(module)
        alike = alike and self._equal(like.record, module, given)  # type: ignore[arg-type]
        passed = [next((i for i, leaf in enumerate(before.leaves) if leaf is x), None) for x in like.inputs]
        alike = alike and any(i is not None for i in passed)
        for x, known, i in zip(tensors, like.inputs, passed, strict=False):
            alike = alike and x is (known if i is None else calls[index - 1].leaves[i])
        if not alike:
            raise UnequalError(container_of(row))
        calls.append(replace(like, inputs=tensors))
        return like

    def _recorded(
        self, module: nn.Module, group: int, given: _Given, tensors: list[Tensor], run: Callable[[], Any]
    ) -> Any:
        path = self._path(module)
        record = _Record(number=self._numbers, module=module, path=path, given=given)
        before = _attributes(module)
        edges = [_edge(x) for x in tensors]
        state, kept = _state(module)
        self._active.append(record)
        try:
            with _reads(self._active):
                result = self._marked(record, module, group, tensors, run)
        finally:
            self._active.pop()
        after, _ = _state(module)
        weights = {id(x): name for name, x in _named_weights(module)}
        leaves, record.spec = tree_flatten(result)
        with without_overriding():  # the number of selected rows in a shape would count as read
            found = [_result(leaf, tensors, weights) for leaf in leaves]
        del kept
        if state != after:
            self._changing.add(group)
        if group not in self._changing and not record.identified and all(item is not _UNKNOWN for item in found):
            record.results = tuple(found)
            record.values = _read(before, record.reads)
            stops = {edge: index for index, edge in enumerate(edges) if edge is not None}
            leaf_inputs = {id(x): i for i, x in enumerate(tensors) if x.requires_grad and x.grad_fn is None}
            record.reach = tuple(
                self._reached(leaf, stops, leaf_inputs, weights) if isinstance(leaf, Tensor) else () for leaf in leaves
            )
            record.usable = True
        self._records[group].append(record)
        return result

    def _marked(
        self, record: _Record, module: nn.Module, group: int, tensors: list[Tensor], run: Callable[[], Any]
    ) -> Any:
        """A traced call between its two marks."""
        number = self._mark(record, module, group, len(tensors))
        path = self._path(module)
        torch.ops.partc.module_call.default(tensors, number, path)
        self._inside.append(number)
        try:
            result = run()
        finally:
            self._inside.pop()
        made = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
        torch.ops.partc.module_call.default(made, number, path)
        return result

    def _repeated(self, record: _Record, module: nn.Module, group: int, tensors: list[Tensor]) -> Any:
        """The results of an equal call: new tensors behind one mark, or inputs and weights where the record returns
        these.
        """
        returned = [result for result in record.results if isinstance(result, _TensorKind) or result[0] != "plain"]
        outputs = tuple(index for index, result in enumerate(returned) if isinstance(result, _TensorKind))
        number = self._mark(record, module, group, len(tensors), outputs)
        weights = dict(_named_weights(module))
        leaves: list[Any] = []
        made: list[Tensor] = []
        for index, result in enumerate(record.results):
            match result:
                case _TensorKind():
                    leaf = torch.empty_strided(result.shape, result.stride, dtype=result.dtype)
                    if result.trained:
                        leaf.requires_grad = True
                        self._made[id(leaf)] = (leaf, record, tensors, module, index)
                    leaves.append(leaf)
                    made.append(leaf)
                case ("input", place):
                    leaves.append(tensors[place])
                case ("weight", name):
                    leaves.append(weights[name])
                case (_, value):
                    leaves.append(value)
        torch.ops.partc.module_call.default([*tensors, *made], number, self._path(module))
        assert record.spec is not None
        return tree_unflatten(leaves, record.spec)

    def _mark(
        self, record: _Record, module: nn.Module, group: int, inputs: int, outputs: tuple[int, ...] | None = None
    ) -> int:
        number, self._numbers = self._numbers, self._numbers + 1
        path = self._path(module)
        self.calls[number] = CallMark(
            group=group,
            record=record.number,
            traced=outputs is None,
            inputs=inputs,
            outputs=outputs or (),
            weights=self._matched(record.path, path) or {},
        )
        return number

    def _path(self, module: nn.Module) -> str:
        return self._paths[id(vars(module))]

    def _matched(self, one: str, other: str) -> dict[str, str] | None:
        """Map the first names of one module's weights to those of the other; None if ties differ."""
        pairs: dict[str, str] = {}
        for below, name in self._weights.get(one, {}).items():
            if pairs.setdefault(name, self._weights[other][below]) != self._weights[other][below]:
                return None
        return pairs if len({*pairs.values()}) == len(pairs) else None

    def _equal(self, record: _Record, module: nn.Module, given: _Given) -> bool:
        if not record.usable or record.given != given:
            return False
        path = self._path(module)
        if self._matched(record.path, path) is None:
            return False
        pair = _Pair(self._paths, record.path, path)
        for values, part in zip(record.values, _parts(module), strict=True):
            held = vars(part)
            for name, value in values.items():
                if name not in held or (held[name] is not value and not pair.equal(value, held[name], DEPTH)):
                    return False
        return True

    # -- gradients -------------------------------------------------------------------------------

    def leaves(self, loss: Tensor) -> frozenset[int]:
        """The identities of the leaves of the loss's autograd graph, through calls that were not traced."""
        found = self._reached(loss, {}, {}, {})
        return frozenset(id(leaf) for _, leaf in found)

    def _reached(
        self,
        result: Tensor,
        stops: Mapping[Edge, int],
        inputs: Mapping[int, int],
        weights: Mapping[int, str],
    ) -> tuple[Any, ...]:
        """The leaves behind a tensor: ("input", index), ("weight", name) or ("leaf", tensor)."""
        found: dict[tuple[str, Any], tuple[str, Any]] = {}
        seen: set[Edge] = set()
        waiting: list[Edge] = []

        def add(x: Tensor) -> None:
            edge = _edge(x)
            if edge is not None:
                waiting.append(edge)
            elif x.requires_grad:
                leaf(x)

        def leaf(x: Tensor) -> None:
            if id(x) in inputs:
                found["input", inputs[id(x)]] = ("input", inputs[id(x)])
            elif id(x) in self._made:
                _, record, tensors, module, index = self._made[id(x)]
                own = dict(_named_weights(module))
                for kind, key in record.reach[index]:
                    add(tensors[key] if kind == "input" else own[key] if kind == "weight" else key)
            elif id(x) in weights:
                found["weight", weights[id(x)]] = ("weight", weights[id(x)])
            else:
                found["leaf", id(x)] = ("leaf", x)

        add(result)
        while waiting:
            edge = waiting.pop()
            if edge in seen:
                continue
            seen.add(edge)
            if edge in stops:
                found["input", stops[edge]] = ("input", stops[edge])
                continue
            node = edge[0]
            variable = getattr(node, "variable", None)
            if variable is not None:
                leaf(variable)
            waiting.extend((before, index) for before, index in node.next_functions if before is not None)
        return tuple(found.values())


def _edge(x: Tensor) -> Edge | None:
    return None if x.grad_fn is None else (x.grad_fn, x.output_nr)


# -- equal modules -------------------------------------------------------------------------------


def _grouped(modules: Mapping[str, nn.Module], constants: Mapping[str, Hashable]) -> Iterator[tuple[int, int]]:
    """The group number of each module that has parts, by the identity of the module's `__dict__`."""
    numbers: dict[Any, int] = {}
    known: dict[int, int] = {}
    values: dict[int, list[tuple[str, Hashable]]] = {}
    for path, value in constants.items():
        owner, _, name = path.rpartition(".")
        values.setdefault(id(modules[owner]), []).append((name, value))

    def number(module: nn.Module) -> int:
        if id(module) not in known:
            kinds = [
                tuple((name, None if x is None else (_TensorKind.of(x), _attached(x))) for name, x in store.items())
                for store in (module._parameters, module._buffers)
            ]
            parts = tuple((name, part is not None and number(part)) for name, part in module._modules.items())
            # A hook changes the gradient of one weight, outside of the module's calls.
            hooked = tuple(id(x) for x in module._parameters.values() if getattr(x, TENSOR_HOOKS[0], None))
            key = (type(module), *kinds, parts, tuple(values.get(id(module), ())), hooked)
            known[id(module)] = numbers.setdefault(key, len(numbers))
        return known[id(module)]

    for index, module in enumerate(modules.values()):
        found = number(module)
        if index and any(True for _ in module.children()):  # a module may be false, or raise
            yield id(vars(module)), found


def _attached(x: Tensor) -> Hashable:
    """The class of a weight, and the attributes that the model gives it, with the values of plain ones."""
    given = ((name, repr(value) if isinstance(value, _PLAIN) else type(value)) for name, value in vars(x).items())
    return type(x), *given


def _weights(model: nn.Module) -> dict[str, dict[str, str]]:
    """For every module: the names of parameters and buffers below it -> their first names in the model."""
    first: dict[int, str] = {}
    found: dict[str, dict[str, str]] = {}

    def names_below(path: str, module: nn.Module) -> dict[str, str]:
        mine = {
            name: first.setdefault(id(x), path + name)
            for store in (module._parameters, module._buffers)
            for name, x in store.items()
            if x is not None
        }
        for name, part in module._modules.items():
            if part is not None:
                mine |= {f"{name}.{inner}": whole for inner, whole in names_below(f"{path}{name}.", part).items()}
        found[path[:-1]] = mine
        return mine

    names_below("", model)
    return found


def _named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _hooked(module: nn.Module) -> bool:
    """Whether calls run hooks, or a `forward` that is set on an instance, in the module or below it."""
    return any("forward" in part.__dict__ or any(map(part.__dict__.get, _HOOKS)) for part in _parts(module))


def _parts(module: nn.Module) -> list[nn.Module]:
    """The module and all parts below it, in order, each as often as it is named."""
    found = [module]
    for part in module._modules.values():
        if part is not None:
            found += _parts(part)
    return found


def _attributes(module: nn.Module) -> list[tuple[int, dict[str, Any]]]:
    """For each part of a module: the id of its `__dict__`, and its attributes other than weights and parts."""
    return [
        (id(vars(part)), {name: value for name, value in vars(part).items() if name not in _KEPT_APART})
        for part in _parts(module)
    ]


def _read(attributes: Sequence[tuple[int, dict[str, Any]]], reads: Set[tuple[int, str]]) -> list[dict[str, Any]]:
    """The attributes of a module's parts that were read."""
    return [
        {name: value for name, value in held.items() if (key, name) in reads or (key, "__dict__") in reads}
        for key, held in attributes
    ]


def _state(module: nn.Module) -> tuple[Any, list[Any]]:
    """A snapshot of the attributes and members of a module, with the objects that it must keep alive."""
    kept: list[Any] = []
    known: dict[int, Any] = {}
    found = [
        (path, name, comparable_copy(value, kept, DEPTH, known))
        for path, part in module.named_modules(remove_duplicate=False)
        for name, value in vars(part).items()
    ]
    return found, kept


def _path_below(path: str | None, top: str) -> str | None:
    """The path below the module `top`; None outside it."""
    if path is None or not (path == top or path.startswith(f"{top}.")):
        return None
    return path[len(top) + 1 :]


@contextmanager
def _reads(active: list[_Record]) -> Iterator[None]:
    """A context in which reads of modules' attributes, and lookups of modules in tables, are noted in every active
    record.
    """
    if len(active) > 1:
        yield
        return

    def noting(module: nn.Module, name: str) -> Any:
        attributes = object.__getattribute__(module, "__dict__")
        # torch itself looks up weights and parts in `__dict__`.
        if name != "__dict__" or not is_machinery(sys._getframe(1).f_code.co_filename):
            for record in active:
                record.reads.add((id(attributes), name))
        return object.__getattribute__(module, name)

    def hashed(module: nn.Module) -> int:
        if not is_machinery(sys._getframe(1).f_code.co_filename):
            for record in active:
                record.identified = True
        return object.__hash__(module)

    nn.Module.__getattribute__ = noting  # type: ignore[method-assign,assignment]
    nn.Module.__hash__ = hashed  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del nn.Module.__getattribute__, nn.Module.__hash__


@dataclass(frozen=True, slots=True)
class _Pair:
    """Comparison of values in two modules; a part of one equals the corresponding part of the other."""

    paths: Mapping[int, str]
    one: str
    other: str

    def equal(self, a: Any, b: Any, depth: int) -> bool:
        if a is b:
            return True
        if depth == 0 or type(a) is not type(b):
            return False
        if isinstance(a, _PLAIN):
            return bool(a == b)
        if isinstance(a, nn.Module):
            places = (
                _path_below(self.paths.get(id(vars(a))), self.one),
                _path_below(self.paths.get(id(vars(b))), self.other),
            )
            return places[0] is not None and places[0] == places[1]
        if isinstance(a, list | tuple | deque):
            return len(a) == len(b) and all(self.equal(x, y, depth - 1) for x, y in zip(a, b, strict=True))
        if isinstance(a, dict):
            return [*a] == [*b] and all(self.equal(x, b[key], depth - 1) for key, x in a.items())
        if isinstance(a, set | frozenset):
            return bool(a == b) and all(isinstance(x, _PLAIN) for x in a)
        if isinstance(a, types.MethodType):
            return a.__func__ is b.__func__ and self.equal(a.__self__, b.__self__, depth - 1)
        if isinstance(a, partial):
            return a.func is b.func and self.equal([*a.args, a.keywords], [*b.args, b.keywords], depth - 1)
        if isinstance(a, Tensor) or callable(a) or not hasattr(a, "__dict__"):
            return False
        return self.equal(vars(a), vars(b), depth - 1)


# -- inputs and results --------------------------------------------------------------------------


class _Unknown:
    """A result that an equal call could not return."""


_UNKNOWN = _Unknown()


def _comparable_inputs(spec: TreeSpec, leaves: Iterable[Any]) -> _Given | None:
    """The inputs of a call in comparable form; None if they contain objects whose state cannot be compared."""
    with without_overriding():  # the trace's modes would intercept every read of a shape
        return _compared(spec, leaves)


def _compared(spec: TreeSpec, leaves: Iterable[Any]) -> _Given | None:
    places: dict[int, int] = {}
    found: list[Any] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            found.append(("same", places[id(leaf)]) if id(leaf) in places else _TensorKind.of(leaf))
            places.setdefault(id(leaf), index)
        elif isinstance(leaf, _PLAIN):
            found.append((type(leaf).__name__, leaf))
        else:
            return None
    return _Given(spec, tuple(found), modes())


def _python_values(tree: Any) -> Hashable:
    """The leaves of a tree in hashable form: their kinds, and the values of plain ones."""
    leaves, spec = tree_flatten(tree)
    return str(spec), tuple((type(x), repr(x) if isinstance(x, _PLAIN) else None) for x in leaves)


def _result(leaf: Any, inputs: Sequence[Tensor], weights: Mapping[int, str]) -> Any:
    if isinstance(leaf, Tensor):
        given = next((index for index, x in enumerate(inputs) if x is leaf), None)
        if given is not None:
            return ("input", given)
        return ("weight", weights[id(leaf)]) if id(leaf) in weights else _TensorKind.of(leaf)
    return ("plain", leaf) if isinstance(leaf, _PLAIN) else _UNKNOWN
