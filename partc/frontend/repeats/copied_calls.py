"""Calls of torch functions that repeat, such as those of a loop over time, are copied in the graph of a trace.

    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] + h)      -> from the fourth step on, the nodes of the step before with other operands

Torch takes milliseconds to trace an operation. A call is copied if torch has traced equal calls, and found equal nodes
and results: equal are the function, the lines that lead to it, plain arguments, types of tensors, modes, and which
tensors are the same. The place of an index may move from call to call; nodes then hold it where they held those of the
calls before. Python runs all steps, so that nothing is assumed of the user's code.

A copied result is a tensor of its own with the type of the traced one. Its autograd graph has one node, with an edge to
each operand whose gradient the traced call gives; this suffices to find the leaves behind a loss. A copied write of
rows (`y[:, t] = h`) gives the tensor such a node. Where more is needed, the model is traced without copies: for
gradients within forward, and for changes in place of a tensor that has copied views, or of such a view.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx

from partc.frontend.model_precision import modes
from partc.torch_private import (
    FakeTensor,
    OpOverload,
    active_modes,
    said_class,
    storage_identity,
    traced_tensor,
    tracer,
    track,
    with_node,
    without_overriding,
)

EQUAL = 2  # the fewest traced calls with equal nodes before one is copied; an index needs one more
_EXACT = (bool, int, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
_AS_TEXT = (float, complex)  # 0.0 == -0.0
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_COPY = torch.ops.aten.copy_.default
# Functions with these flags run in frames that go on at several places of their callers.
_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_SEQUENCES = (tuple, list, torch.Size)
# The graph or the results of operations with these tags depend on more than their operands.
_VARYING = frozenset(
    {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
)
# These read the place of a tensor in its memory.
_PLACED = frozenset({"as_strided", "as_strided_copy", "as_strided_scatter", "storage_offset", "sym_storage_offset"})


class UncopiedError(Exception):
    """The model has to be traced without copies."""


class _Unfit(Exception):
    """A call that is neither recorded nor copied."""


@dataclass(frozen=True, slots=True)
class _Operand:
    """The tensor with this number among those of a call."""

    number: int


@dataclass(frozen=True, slots=True)
class _Made:
    """The result of a call's node with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class _MovingPlace:
    """The integer with this number among the places of a call's index."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """A new tensor that a call returns: its node, its type, and the operands to which its gradient goes."""

    node: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    trained: bool
    reach: tuple[int, ...]
    view_of: int | None  # the operand whose memory it shares


@dataclass(frozen=True, slots=True, kw_only=True)
class _InPlaceChange:
    """A change in place of the first operand: the changes of its version, and the operands to which gradients go from
    then on, if these change.
    """

    versions: int
    reach: tuple[int, ...]


_Form = tuple[Any, Any, Any]  # the target of a node, its arguments and its named arguments


@dataclass(frozen=True, slots=True)
class _Traced:
    """A call that torch has traced: the places of its index, its nodes, and the results with their container."""

    places: tuple[int, ...]
    nodes: tuple[fx.Node, ...]
    forms: tuple[_Form, ...]
    container: type | None
    results: tuple[_Result | _Operand, ...]
    kept: tuple[tuple[int, int], ...]  # operands that a node returns, with the node
    write: _InPlaceChange | None

    def returns_like(self, other: _Traced) -> bool:
        """Whether the results of two calls are equal."""
        mine, others = ((each.container, each.results, each.kept, each.write) for each in (self, other))
        return mine == others


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Calls with equal keys: the last traced one, the forms of the nodes with places of the index that move, the places
    that have not moved, and the number of traced calls with these forms.
    """

    last: _Traced
    forms: tuple[_Form, ...]
    fixed: Mapping[int, int]
    equal: int = 1

    def covers(self, call: _GivenCall) -> bool:
        return all(call.places[number] == place for number, place in self.fixed.items())


@dataclass(slots=True)
class _GivenCall:
    """A call in a form that compares."""

    key: Hashable
    tensors: list[Tensor]
    nodes: list[fx.Node]
    places: tuple[int, ...]
    writes: bool  # whether the call changes its first operand in place


class CopiedCalls:
    """The calls of one trace. `runner` is the file whose code calls the model."""

    def __init__(self, runner: str, *, copying: bool = True) -> None:
        self._refused = False
        self._runner = runner
        self._copying = copying
        self._kinds: dict[Hashable, _Kind] = {}
        self._tracer: Any = None
        self._above: Any = None
        self._codes: dict[int, CodeType] = {}  # keeps them alive, because keys have their identities
        self._frame: FrameType | None = None  # that made the last call, and the number of the lines that lead to it
        self._around = 0
        self._lines_around: dict[tuple[int, ...], int] = {}
        self._functions: set[Any] = set()  # functions that return no tensors
        self._viewed: dict[int, torch.UntypedStorage] = {}  # of tensors with copied views, and of these views

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any, frame: FrameType) -> Any:
        """The result of `func(*args, **kwargs)`, a call of a torch function below the modes of the trace."""
        try:
            with without_overriding():
                call = self._comparable(func, args, kwargs, frame)
                kind = self._kinds.get(call.key)
                if kind is not None and kind.equal >= EQUAL and kind.covers(call):
                    return self._copied(kind, call)
        except _Unfit:
            return func(*args, **kwargs)
        with without_overriding():
            before = _CallStart(self._tracer.graph._root.prev, call)
        made = func(*args, **kwargs)
        with without_overriding():
            self._record(func, call, before, made)
        return made

    # -- comparable calls ------------------------------------------------------------------------

    def _comparable(self, func: Callable[..., Any], args: Any, kwargs: Any, frame: FrameType) -> _GivenCall:
        """Raises _Unfit for calls that are not copied."""
        home = getattr(func, "__module__", None)
        if (
            not self._copying
            or func in self._functions
            or (isinstance(func, FunctionType) and str(home).partition(".")[0] != "torch")
        ):
            raise _Unfit
        now, above = tracer(), active_modes()
        if self._tracer is None:
            self._tracer, self._above = now, above
        if now is None or now is not self._tracer or above != self._above:
            raise _Unfit
        call = _GivenCall(None, [], [], (), func is Tensor.__setitem__)
        places: dict[int, int] = {}
        moving = None
        if func in _INDEXING and not kwargs and isinstance(args[0], Tensor):
            moving = _index_key(args[0], args[1], places)
        if moving is not None:
            args = (args[0], *args[2:])
        given = moving, self._key((args, kwargs), call)
        call.key = (func, given, *self._tensor_keys(call), modes(), *self._lines(frame))
        call.places = tuple(places)
        if not call.tensors or (call.writes and call.tensors[0]._is_view()):
            raise _Unfit
        return call

    def _key(self, arg: Any, call: _GivenCall) -> Hashable:
        if isinstance(arg, Tensor):
            number = next((i for i, x in enumerate(call.tensors) if x is arg), len(call.tensors))
            if number == len(call.tensors):
                held = self._tracer.tensor_tracker.get(arg)
                if held is None or held.constant is not None:
                    raise _Unfit
                call.tensors.append(arg)
                call.nodes.append(held.proxy.node)
            return _Operand(number)
        kind = type(arg)
        if kind in _EXACT:
            return kind, arg
        if kind in _AS_TEXT:
            return kind, repr(arg)
        if kind in _SEQUENCES:
            return kind, tuple([self._key(each, call) for each in arg])
        if kind is slice:
            return kind, tuple([self._key(each, call) for each in (arg.start, arg.stop, arg.step)])
        if kind is dict:
            return kind, tuple([(name, self._key(each, call)) for name, each in arg.items()])
        raise _Unfit

    @staticmethod
    def _tensor_keys(call: _GivenCall) -> Iterator[Hashable]:
        for place, x in enumerate(call.tensors):
            if not isinstance(x, FakeTensor) or x.layout is not torch.strided or _is_stale_view(x):
                raise _Unfit
            if any(isinstance(size, torch.SymInt) for size in x.shape):  # of a mask or of `unique`
                raise _Unfit
            yield (
                call.nodes.index(call.nodes[place]), x.dtype, x.shape, x.stride(), x.fake_device, x.requires_grad,
                x.is_leaf, -1 if call.writes and not place else x._version, x.is_conj(), x.is_neg(),
                x.is_inference(), said_class(x),
            )  # fmt: skip

    def _lines(self, frame: FrameType | None) -> Iterator[int]:
        """The line that makes a call, and the number of the lines that lead to it."""
        if frame is not None and frame.f_code.co_filename != self._runner:
            yield self._code(frame)
            yield frame.f_lasti
            if frame is not self._frame:  # the frames around one that runs stay where they are
                self._frame = None if frame.f_code.co_flags & _RESUMED else frame
                outer = tuple(self._outer_lines(frame.f_back))
                self._around = self._lines_around.setdefault(outer, len(self._lines_around))
            yield self._around

    def _outer_lines(self, frame: FrameType | None) -> Iterator[int]:
        while frame is not None and frame.f_code.co_filename != self._runner:
            yield self._code(frame)
            yield frame.f_lasti
            frame = frame.f_back

    def _code(self, frame: FrameType) -> int:
        self._codes[id(frame.f_code)] = frame.f_code
        return id(frame.f_code)

    # -- recording -------------------------------------------------------------------------------

    def _record(self, func: Callable[..., Any], call: _GivenCall, before: _CallStart, made: Any) -> None:
        try:
            traced = self._traced(func, call, before, made)
        except _Unfit:
            self._kinds.pop(call.key, None)
            return
        known = self._kinds.get(call.key)
        found = None
        if known is not None and known.last.returns_like(traced):
            if known.covers(call) and _alike(_filled(known.forms, call.places), traced.forms):
                found = replace(known, last=traced, equal=known.equal + 1)
            else:
                found = _moving(known.last, traced)
        fixed = dict(enumerate(traced.places))
        self._kinds[call.key] = found or _Kind(last=traced, forms=traced.forms, fixed=fixed)

    def _traced(self, func: Callable[..., Any], call: _GivenCall, before: _CallStart, made: Any) -> _Traced:
        """The traced call. Raises _Unfit unless it is a pure function of its operands."""
        container = None if isinstance(made, Tensor) else type(made)
        if container not in (None, tuple, list) and not call.writes:
            self._functions.add(func)
            raise _Unfit
        known: dict[fx.Node, Any] = {}
        for number, node in enumerate(call.nodes):
            known.setdefault(node, _Operand(number))
        nodes: list[fx.Node] = []
        forms: list[tuple[Any, Any, Any]] = []
        node = before.node.next
        while node is not self._tracer.graph._root:
            allowed = _is_pure(node.target) or (call.writes and node.target is _COPY)
            if node.op != "call_function" or not allowed or "val" not in node.meta:
                raise _Unfit
            forms.append((node.target, _form(node.args, known), _form(node.kwargs, known)))
            known[node] = _Made(len(nodes))
            nodes.append(node)
            node = node.next
        leaves = () if call.writes else (made,) if container is None else made
        results: tuple[_Result | _Operand, ...] = tuple(self._result(x, call, known) for x in leaves)
        new = [(x, each) for x, each in zip(leaves, results, strict=True) if isinstance(each, _Result)]
        separate = [_memory(x) for x, each in new if each.view_of is None]
        if (
            (not leaves and not call.writes)
            or len({each.node for _, each in new}) < len(new)
            or len({*separate}) < len(separate)
        ):
            raise _Unfit
        kept: list[tuple[int, int]] = []
        for number, x in enumerate(call.tensors):
            last = self._tracer.tensor_tracker[x].proxy.node
            if last is not call.nodes[number]:
                kept.append((number, known[last].number))
        return _Traced(
            call.places,
            tuple(nodes),
            tuple(forms),
            container,
            results,
            tuple(kept),
            before.write(call) if call.writes else None,
        )

    def _result(self, x: Any, call: _GivenCall, known: Mapping[fx.Node, Any]) -> _Result | _Operand:
        for number, given in enumerate(call.tensors):
            if x is given:
                return _Operand(number)
        held = self._tracer.tensor_tracker.get(x) if isinstance(x, FakeTensor) else None
        made = None if held is None or held.constant is not None else known.get(held.proxy.node)
        if not isinstance(made, _Made) or x.layout is not torch.strided or vars(x).get("_is_param"):
            raise _Unfit
        if x.is_conj() or x.is_neg() or x.is_inference() or _is_stale_view(x):
            raise _Unfit
        reach = _reach(x, _edges(call.tensors)) if x.requires_grad else ()
        shared = (number for number, given in enumerate(call.tensors) if _memory(given) == _memory(x))
        return _Result(
            node=made.number,
            dtype=x.dtype,
            shape=tuple(x.shape),
            stride=x.stride(),
            device=x.fake_device,
            trained=x.requires_grad,
            reach=reach,
            view_of=next(shared, None),
        )

    # -- copying ---------------------------------------------------------------------------------

    def _copied(self, kind: _Kind, call: _GivenCall) -> Any:
        graph, traced = self._tracer.graph, kind.last
        stack = {
            key: (path, cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}")
            for key, (path, cls) in self._tracer.module_stack.items()
        }
        nodes: list[fx.Node] = []
        for (target, args, kwargs), like in zip(kind.forms, traced.nodes, strict=True):
            args, kwargs = _filled((args, kwargs), call.places, call.nodes, nodes)
            name = graph._target_to_str(target.overloadpacket.__name__) if isinstance(target, OpOverload) else None
            node = graph.create_node("call_function", target, args, kwargs, name)
            node.meta = {**like.meta, "nn_module_stack": dict(stack)}
            nodes.append(node)
        for number, place in traced.kept:
            track(self._tracer, call.tensors[number], nodes[place])
        if traced.write is not None:
            self._written(traced.write, call)
            return None
        made = [
            call.tensors[result.number] if isinstance(result, _Operand) else self._made(result, call, nodes)
            for result in traced.results
        ]
        return made[0] if traced.container is None else traced.container(made)

    def _made(self, result: _Result, call: _GivenCall, nodes: Sequence[fx.Node]) -> Tensor:
        mode: Any = getattr(call.tensors[0], "fake_mode")  # noqa: B009
        x = traced_tensor(mode, result.shape, result.stride, result.dtype, result.device)
        if result.view_of is not None:
            source = call.tensors[result.view_of]
            self._viewed |= {_memory(each): each.untyped_storage() for each in (source, x)}
        if result.trained:
            x = with_node(_Copied, [x], self, *(call.tensors[number] for number in result.reach))
        track(self._tracer, x, nodes[result.node])
        return x

    def _written(self, write: _InPlaceChange, call: _GivenCall) -> None:
        x, *_ = call.tensors
        version = x._version + write.versions
        if write.reach:
            with_node(_Written, self, x, *(call.tensors[number] for number in write.reach if number))
        for _ in range(version - x._version):
            torch.autograd.graph.increment_version(x)

    # -- changes in place ------------------------------------------------------------------------

    def versions(self, given: Any) -> Sequence[tuple[Tensor, int]]:
        """The versions of the tensors among the arguments of a call that share memory with copied views."""
        if not self._viewed:
            return ()
        found: list[Tensor] = []
        _add_tensors(given, found)
        with without_overriding():
            return [(x, x._version) for x in found if self._has_views(x)]

    def check_unchanged(self, versions: Sequence[tuple[Tensor, int]]) -> None:
        """Raise UncopiedError if a tensor has changed."""
        if versions:
            with without_overriding():
                changed = any(x._version != version for x, version in versions)
            if changed:
                self.refuse()

    def refuse(self) -> None:
        """Raise UncopiedError, now and in `check`: the model's code may catch it."""
        self._refused = True
        raise UncopiedError

    def check(self) -> None:
        """End the copying of calls. Raises UncopiedError if `refuse` has raised it before."""
        self._frame = None
        if self._refused:
            raise UncopiedError

    def _has_views(self, x: Tensor) -> bool:
        return isinstance(x, FakeTensor) and _memory(x) in self._viewed


class _Copied(torch.autograd.Function):
    """The node of a copied result in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, made: list[Tensor], calls: CopiedCalls, *operands: Tensor) -> Tensor:
        ctx.calls = calls
        return made[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.calls.refuse()


class _Written(torch.autograd.Function):
    """The node of a tensor that a copied call has changed in place."""

    @staticmethod
    def forward(ctx: Any, calls: CopiedCalls, x: Tensor, *_: Tensor) -> Tensor:
        ctx.calls = calls
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.calls.refuse()


class _CallStart:
    """The state before a traced call: the last node, and the operands in the autograd graph."""

    def __init__(self, node: fx.Node, call: _GivenCall) -> None:
        self.node = node
        self._version = 0
        self._grad_fn: Any = None
        self._edges: _Edges | None = None
        if call.writes:
            x = call.tensors[0]
            self._version, self._grad_fn, self._edges = x._version, x.grad_fn, _edges(call.tensors)

    def write(self, call: _GivenCall) -> _InPlaceChange:
        """The change of the call's first operand."""
        x = call.tensors[0]
        assert self._edges is not None
        reach = () if x.grad_fn is self._grad_fn else _reach(x, self._edges)
        if reach and reach[0] and self._grad_fn is not None:  # the earlier values are overwritten
            raise _Unfit
        return _InPlaceChange(versions=x._version - self._version, reach=reach)


# -- forms of nodes ------------------------------------------------------------------------------


def _is_pure(target: Any) -> bool:
    """Whether the results of an operation are new, and its graph depends on nothing but its operands."""
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    return not _VARYING & {*target.tags} and target.overloadpacket.__name__ not in _PLACED


def _form(arg: Any, known: Mapping[fx.Node, Any]) -> Any:
    """An argument of a node, with operands and results of other nodes by number."""
    if isinstance(arg, fx.Node):
        if arg not in known:
            raise _Unfit
        return known[arg]
    if isinstance(arg, tuple):
        return tuple([_form(each, known) for each in arg])
    if isinstance(arg, list):
        return [_form(each, known) for each in arg]
    if isinstance(arg, dict):
        return {name: _form(each, known) for name, each in arg.items()}
    if type(arg) in (*_EXACT, *_AS_TEXT):
        return arg
    raise _Unfit


def _filled(
    form: Any, places: Sequence[int], operands: Sequence[fx.Node] | None = None, nodes: Sequence[fx.Node] = ()
) -> Any:
    """A form with the places of an index and, if they are given, the operands and nodes of a call."""
    kind = type(form)
    if kind is tuple:
        return tuple([_filled(each, places, operands, nodes) for each in form])
    if kind is list:
        return [_filled(each, places, operands, nodes) for each in form]
    if kind is dict:
        return {name: _filled(each, places, operands, nodes) for name, each in form.items()}
    if kind is _MovingPlace:
        return places[form.number]
    if operands is not None and kind in (_Operand, _Made):
        return operands[form.number] if kind is _Operand else nodes[form.number]
    return form


def _alike(one: Any, other: Any) -> bool:
    """Whether two forms are equal, also in the types of numbers and the signs of zeros."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, dict):
        return [*one] == [*other] and all(map(_alike, one.values(), other.values()))
    return repr(one) == repr(other) if isinstance(one, _AS_TEXT) else bool(one == other)


def _moving(one: _Traced, other: _Traced) -> _Kind | None:
    """The kind of two calls, whose indices differ in some places; None if their nodes differ in another way as well."""
    moves = {pair: _MovingPlace(number) for number, pair in enumerate(zip(one.places, other.places, strict=True))}

    def merged(a: Any, b: Any) -> Any:
        if isinstance(a, tuple | list) and type(a) is type(b) and len(a) == len(b):
            return type(a)([merged(x, y) for x, y in zip(a, b, strict=True)])
        if isinstance(a, dict) and isinstance(b, dict) and [*a] == [*b]:
            return {name: merged(x, b[name]) for name, x in a.items()}
        if _alike(a, b):
            return a
        if type(a) is not int or type(b) is not int or (a, b) not in moves:
            raise _Unfit
        return moves[a, b]

    try:
        forms = merged(one.forms, other.forms)
    except _Unfit:
        return None
    fixed = {number: a for number, (a, b) in enumerate(zip(one.places, other.places, strict=True)) if a == b}
    return _Kind(last=other, forms=forms, fixed=fixed)


def _index_key(x: Tensor, index: Any, places: dict[int, int]) -> Hashable:
    """A key for the index of `x[index]`, equal for indices that differ only in the places of integers and slices.

    The places are added to `places`. The key is None if the index has parts of other kinds, such as tensors.
    """
    parts = index if type(index) is tuple else (index,)
    if any(part is not None and part is not ... and type(part) not in (int, slice) for part in parts):
        return None
    later = sum(type(part) in (int, slice) for part in parts)
    if later > x.dim() or sum(part is ... for part in parts) > 1:
        return None
    dim = 0
    found: list[Hashable] = [type(index) is tuple]
    for part in parts:
        if part is ...:
            dim = x.dim() - later
            found.append(part)
        elif part is None:
            found.append(part)
        else:
            found.append(_part_key(part, x.shape[dim], places))
            dim, later = dim + 1, later - 1
    return tuple(found)


def _part_key(part: Any, size: int, places: dict[int, int]) -> Hashable:
    number = lambda place: places.setdefault(place, len(places))  # noqa: E731
    if type(part) is int:
        return (int, number(part)) if 0 <= part < size else (int, "place", part)
    first, last, step = part.start, part.stop, part.step
    if type(first) is type(last) is int and step is None and 0 <= first < last <= size and last - first < size:
        return slice, last - first, number(first), number(last)
    if any(each is not None and type(each) is not int for each in (first, last, step)):
        raise _Unfit
    return slice, "places", first, last, step


# -- surroundings of calls -----------------------------------------------------------------------


_Edges = tuple[Mapping[Any, int], Mapping[int, int]]  # operands by their edges, and leaves by their identities


def _edges(operands: Sequence[Tensor]) -> _Edges:
    """The operands in the autograd graph."""
    edges: dict[Any, int] = {}
    leaves: dict[int, int] = {}
    for number, operand in enumerate(operands):
        if operand.grad_fn is not None:
            edges.setdefault((operand.grad_fn, operand.output_nr), number)
        elif operand.requires_grad:
            leaves[id(operand)] = number
    return edges, leaves


def _reach(x: Tensor, operands: _Edges) -> tuple[int, ...]:
    """The operands behind a tensor in the autograd graph, by number. Raises _Unfit if it has other leaves."""
    edges, leaves = operands
    if x.grad_fn is None:
        raise _Unfit
    found: set[int] = set()
    waiting: list[Any] = [(x.grad_fn, x.output_nr)]
    seen: set[Any] = set()
    while waiting:
        edge = waiting.pop()
        if edge in seen:
            continue
        seen.add(edge)
        node = edge[0]
        if edge in edges:
            found.add(edges[edge])
        elif hasattr(node, "variable"):
            if id(node.variable) not in leaves:
                raise _Unfit
            found.add(leaves[id(node.variable)])
        else:
            waiting += [each for each in node.next_functions if each[0] is not None]
    if not found:
        raise _Unfit
    return tuple(sorted(found))


def _is_stale_view(x: Tensor) -> bool:
    """Whether a view may have changed through another one: reading its `grad_fn` may then add nodes to the graph."""
    return x._is_view() and x._version > 0


def _memory(x: Tensor) -> int:
    return storage_identity(x.untyped_storage())


def _add_tensors(given: Any, found: list[Tensor]) -> None:
    """Add the tensors of nested arguments to a list."""
    if isinstance(given, Tensor):
        found.append(given)
    elif isinstance(given, tuple | list):
        for each in given:
            _add_tensors(each, found)
    elif isinstance(given, dict):
        _add_tensors([*given.values()], found)
