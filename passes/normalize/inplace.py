"""Functionalize in-place operations.

    y = relu(x)                    y     = relu(x)
    a = select(y, 0, 0)            a     = select(y, 0, 0)
    b = select(y, 0, 1)            add_  = add(a, b)
    add_(a, b)              ->     y_2   = select_scatter(y, add_, 0, 0)
    z = mul(y, b)                  b_2   = select(y_2, 0, 1)
                                   z     = mul(y_2, b_2)

A changed view (a slice, a row, a transpose, a diagonal) is put back into its tensor. Later readers of the tensor read
the new value, and a view that is read after a change of its tensor is recomputed, as torch's functionalization does.
The last value of a buffer or a parameter is the first value of the next microbatch. A change is refused if it reaches a
tensor by a view that may be a copy, such as `take`, and the tensor is read afterwards; the graph reader knows reshapes
that are views from those that copy. A change of an input only affects this step. A change with the attribute `no_grad`,
or by `detach`, writes values without a gradient. Readers of a tensor that is changed in this way, and of a changed
parameter, give their gradients to the tensor's value before the change, as in eager mode:

    clamp_(w, 0, 1)                w_new = clamp(w, 0, 1)
    y = mul(x, w)           ->     w_now = own_gradient((w_new,), (w,), (incoming_gradient(w_new),))
                                   y     = mul(x, w_now)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from partc.errors import PartcError
from partc.ir.naming import unique
from partc.ir.operations import effects, shares_memory, spelling
from partc.ir.operators import DTYPE_NAMES, DTYPES, torch_arguments, torch_operator
from partc.ir.program import (
    BY_PATH,
    NO_GRAD,
    PASSED_BY,
    Arg,
    DType,
    DTypeArg,
    Graph,
    Op,
    Ref,
    TensorType,
    Value,
    is_change,
)
from partc.rules import resolve

_FUNCTIONAL = {"normal_": "normal_functional"}  # `normal` draws from tensors of means and deviations
_RESHAPES = frozenset(name for name in spelling("reshape") if effects(name).memory == "view")
_TRANSPOSES = spelling("permute") - {"permute", "movedim"}  # each is its own inverse
_SPANS = spelling("split") - {"unbind"}
_MARKS = (BY_PATH, NO_GRAD, PASSED_BY)
_COMPARISONS = frozenset({
    "eq", "ne", "gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal", "not_equal", "logical_not",
    "logical_and", "logical_or", "logical_xor",
})  # fmt: skip
# In-place operations that change the shape of a view, but no memory.
_RESTRIDES = frozenset({"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_"})


@dataclass(frozen=True, slots=True)
class _View:
    """A value that shares memory with `base`: the result `index` of the operation `op` on it."""

    base: str
    op: Op
    index: int = 0


def without_mutation(
    graph: Graph, states: Mapping[str, TensorType], trained: Collection[str]
) -> tuple[Graph, dict[str, str]]:
    """The graph without in-place operations, and the final names of changed `states`: buffers and `trained` weights.

    Raises PartcError P0212.
    """
    if not any(is_change(op) for op in graph.ops):
        return graph, {}
    return _Functionalization(graph, states, trained).run()


class _Functionalization:
    """One walk over a graph.

    `current` has the latest name of each changed or recomputed value, `seen` the number of changes of its memory that
    this name includes. A value whose memory has changed since then is recomputed when it is read.
    """

    def __init__(self, graph: Graph, states: Mapping[str, TensorType], trained: Collection[str]) -> None:
        self._graph = graph
        self._states = states
        self._trained = trained
        self._types = {**states, **graph.types()}
        self._last = _last_reads(graph)
        self._live = _live(graph, self._types, trained)
        self._makers = graph.makers()
        self._owners = _owners(graph, self._types)
        self._taken = set(self._types)
        self._roots: dict[str, str] = {}  # view -> the value whose memory it shares
        self._views: dict[str, _View] = {}
        self._current: dict[str, str] = {}
        self._seen: dict[str, int] = {}
        self._changes: dict[str, list[Op]] = {}  # root -> the changes of its memory
        self._ops: list[Op] = []

    def run(self) -> tuple[Graph, dict[str, str]]:
        for index, op in enumerate(self._graph.ops):
            first = next(op.refs(), None)
            if op.name in _RESTRIDES:
                op = replace(_recorded(op), name=op.name.removesuffix("_"))
            elif is_change(op) and first is not None:
                self._change(op, first, index)
                continue
            self._ops.append(replace(self._renewed(op), results=op.results))
            if first is not None and shares_memory(op, self._types):
                own = replace(op, name="alias") if self._is_same(op, first) else op
                for number, value in enumerate(op.results):
                    self._shows(value.name, _View(first, own, number))
        outputs = tuple(self._latest(name) for name in self._graph.outputs)
        ends = {name: self._latest(name) for name in self._states if self._changes.get(name)}
        return replace(self._graph, ops=tuple(self._ops), outputs=outputs), ends

    def _shows(self, name: str, view: _View) -> None:
        root = self._roots.get(view.base, view.base)
        self._roots[name], self._views[name] = root, view
        self._seen[name] = len(self._changes.get(root, ()))

    def _is_same(self, op: Op, first: str) -> bool:
        """Whether a cast returns its operand, because the dtype is already right."""
        cast = op.name in ("to", "type_as") and not dict(op.attrs).get("copy") and True not in op.args
        given = self._types.get(first)
        return cast and given is not None and op.result.type.dtype == given.dtype

    def _renewed(self, op: Op) -> Op:
        return op.renamed({name: self._latest(name) for name in op.refs()})

    def _latest(self, name: str) -> str:
        """The name of a value after all changes of its memory so far."""
        root = self._roots.get(name, name)
        changes = self._changes.get(root, [])
        if self._seen.get(name, 0) == len(changes):
            return self._current.get(name, name)
        view = self._views[name]
        if effects(view.op.name).memory == "some":
            raise _refusal(changes[-1])
        base = Ref(self._latest(view.base))
        made = Value(name=unique(f"{name}_after", self._taken), type=self._types[name])
        shown = _shown(view, base, made)
        if shown is None:
            self._current[name] = base.name
        else:
            self._ops.append(shown)
            self._current[name] = made.name
        self._seen[name] = len(changes)
        return self._current[name]

    def _change(self, op: Op, target: str, index: int) -> None:
        wholes = self._containers(target)
        root = self._roots.get(target, target)
        if root not in (target, *wholes):
            self._check_unread(op, {target, *wholes}, root, index)
        if root in self._states and (BY_PATH, True) not in op.attrs and self._is_unseen(target):
            self._check_unsaved(op, root, index)
        silent = root not in self._states and root in (target, *wholes) and self._is_silent(op, target, index)
        old = self._latest(root) if silent else root
        done = _recorded(self._of_own_type(op, _functional(self._renewed(op))))
        if (NO_GRAD, True) in op.attrs:
            written = replace(op.result, name=unique(f"{op.result.name}_written", self._taken))
            self._ops.append(replace(done, results=(written,)))
            done = Op(name="detach", args=(Ref(written.name),), results=op.results, source=op.source)
        before = {name: self._latest(name) for name in wholes}
        self._ops.append(done)
        self._changes.setdefault(root, []).append(op)
        count = len(self._changes[root])
        now = op.result.name
        self._current[target], self._seen[target] = now, count
        part = target
        for name in wholes:
            made = Value(name=unique(f"{op.result.name}_in_{name}", self._taken), type=self._types[name])
            put = _put_back(self._views[part], Ref(before[name]), Ref(now), made)
            if put is not None:
                self._ops.append(replace(put, source=op.source))
                now = made.name
            self._current[name], self._seen[name] = now, count
            part = name
        if root in self._trained or silent:
            self._give_gradient(root, old, now, op)
            # To be recomputed, with the gradient.
            self._seen.update(dict.fromkeys({target, *wholes} - {root}, count - 1))
        same = Op(name="alias", args=(Ref(target),), results=op.results, source=op.source)
        self._shows(op.result.name, _View(target, same))
        if root in self._trained or silent:
            self._seen[op.result.name] = count - 1  # likewise, if the model reads what the change returns

    def _of_own_type(self, change: Op, functional: Op) -> Op:
        """The operation that makes the new value of a change, in the type of the changed tensor.

        Outside of changes, torch's results have the widest type of their operands, or are booleans.
        """
        made = _functional_type(_functional(change), self._types)
        if made is None or made == change.result.type.dtype:
            return replace(functional, results=change.results)
        type = replace(change.result.type, dtype=made)
        wide = Value(name=unique(f"{change.result.name}_wide", self._taken), type=type)
        self._ops.append(_recorded(replace(functional, results=(wide,))))
        args = (Ref(wide.name), DTypeArg(change.result.type.dtype))
        return Op(name="to", args=args, results=change.results, source=change.source, attrs=change.attrs)

    def _is_silent(self, op: Op, target: str, index: int) -> bool:
        """Whether autograd does not see a change, so that the gradient of the changed tensor bypasses it.

        Raises PartcError P0212 if a backward pass may read the changed values; after changes under no_grad, it would
        fail in eager mode.
        """
        root = self._roots.get(target, target)
        if (NO_GRAD, True) in op.attrs:
            return (PASSED_BY, True) in op.attrs
        if root not in self._live or not self._is_unseen(target):
            return False
        more = not self._live.isdisjoint([*op.refs()][1:])  # whose gradients only readers of the detached tensor give
        maker = self._makers[root]
        if root not in self._graph.outputs and not any(self._live_readers(root, len(self._graph.ops))):
            return False  # no backward pass runs through it
        if more or not self._linear(maker) or any(map(self._saves, self._live_readers(root, index))):
            raise _refusal(op)
        return True

    def _is_unseen(self, target: str) -> bool:
        """Whether a change goes through `detach` or `data`, so that autograd does not notice it."""
        while target in self._views:
            view = self._views[target]
            if view.op.name == "detach":
                return True
            target = view.base
        return False

    def _check_unsaved(self, op: Op, root: str, index: int) -> None:
        """Refuse a change of memory whose values the backward pass of an earlier operation reads: in eager mode it
        would read the changed ones.
        """
        for place in self._reads.get(root, ()):
            reader = self._graph.ops[place]
            if place < index and self._backward_reads(reader, root):
                raise PartcError(
                    "P0212",
                    f"{op.name} changes a tensor behind autograd, and the backward pass of {reader.name} reads it: "
                    "PyTorch computes that gradient from the changed values",
                    help="read a copy before the change: x.clone()",
                    source=op.source,
                )

    def _backward_reads(self, op: Op, root: str) -> bool:
        """Whether the gradient of an operand depends on the memory of `root`, as another operand."""
        if (NO_GRAD, True) in op.attrs or shares_memory(op, self._types) or not effects(op.name).differentiable:
            return False
        names = [*op.refs()]
        read = [place for place, name in enumerate(names) if self._owners.get(name, name) == root]
        if not read or not any(self._owners.get(value.name, value.name) in self._wanted for value in op.results):
            return False
        linear = self._linear(_functional(op) if is_change(op) else op)
        return any(
            not any({place, other} <= {*group} for group in linear)
            for place in read
            for other, name in enumerate(names)
            if name in self._live
        )

    @cached_property
    def _reads(self) -> dict[str, list[int]]:
        """The numbers of the operations that read the memory of each state."""
        found: dict[str, list[int]] = {}
        for index, op in enumerate(self._graph.ops):
            for owner in {self._owners.get(name, name) for name in op.refs()}.intersection(self._states):
                found.setdefault(owner, []).append(index)
        return found

    @cached_property
    def _wanted(self) -> set[str]:
        """The owners of memory that a gradient of the loss reaches, directly or through a view."""
        found = {self._owners.get(name, name) for name in self._graph.outputs}
        for op in reversed(self._graph.ops):
            made = {self._owners.get(value.name, value.name) for value in op.results}
            if (NO_GRAD, True) not in op.attrs and effects(op.name).differentiable and not made.isdisjoint(found):
                found.update(self._owners.get(name, name) for name in op.refs() if name in self._live)
        return found

    def _live_readers(self, root: str, index: int) -> Iterator[Op]:
        """The operations before `index` that read the memory of `root` and give it a gradient."""
        for op in self._graph.ops[:index]:
            silent = shares_memory(op, self._types) or (NO_GRAD, True) in op.attrs
            if not silent and any(x in self._live and self._owners.get(x, x) == root for x in op.refs()):
                yield op

    def _saves(self, op: Op) -> bool:
        """Whether the backward pass of an operation may read an operand."""
        linear = self._linear(_functional(op) if is_change(op) else op)
        return effects(op.name).differentiable and [*map(len, linear)] != [len([*op.refs()])]

    def _linear(self, op: Op) -> Sequence[Collection[int]]:
        """The groups of operands in which an operation is linear: then its backward pass does not read its result."""
        rule = resolve(op, self._types)
        return () if rule is None else rule.linear

    def _give_gradient(self, name: str, before: str, now: str, change: Op) -> None:
        """Let readers of a changed tensor read `now`, whose gradient goes to the value `before`."""
        values = [Value(name=unique(f"{name}_{word}", self._taken), type=self._types[name]) for word in ("grad", "now")]
        gradient = Op(name="incoming_gradient", args=(Ref(now),), results=(values[0],), source=change.source)
        args = ((Ref(now),), (Ref(before),), (Ref(values[0].name),))
        given = Op(name="own_gradient", args=args, results=(values[1],), source=change.source)
        self._ops += (gradient, given)
        self._current[name] = values[1].name

    def _containers(self, name: str) -> list[str]:
        """The tensors that contain a value, innermost first, as far as a change can be written back to them."""
        found = []
        while name in self._views and self._is_part(name):
            name = self._views[name].base
            found.append(name)
        return found

    def _is_part(self, name: str) -> bool:
        view = self._views[name]
        base, own = Ref(view.base), Value(name=name, type=self._types[view.base])
        return view.op.name in ("alias", "detach") or _put_back(view, base, Ref(name), own) is not None

    def _check_unread(self, op: Op, known: set[str], root: str, index: int) -> None:
        """Refuse a change of a view that may be a copy, if its memory is read afterwards."""
        shared = {name for name, base in self._roots.items() if base == root} | {root}
        if root in self._states or any(self._last.get(name, -1) > index for name in shared - known):
            raise _refusal(op)


def _refusal(change: Op) -> PartcError:
    return PartcError(
        "P0212",
        f"{change.name} changes a tensor in place, and a view or the base of that tensor is read afterwards",
        help=f"use {change.name.removesuffix('_')} and the value it returns; build parts with torch.cat or torch.where",
        source=change.source,
    )


def _shown(view: _View, base: Ref, made: Value) -> Op | None:
    """The operation that takes the same view of another base; None if the view is the base itself."""
    if view.op.name == "alias":
        return None
    if len(view.op.results) == 1:
        return replace(view.op, args=(base, *view.op.args[1:]), results=(made,))
    span = _span(view)
    assert span is not None
    name, place = span
    return Op(name=name, args=(base, *place), results=(made,), source=view.op.source)


def _put_back(view: _View, before: Ref, now: Ref, made: Value) -> Op | None:
    """The operation that writes a changed view back into its base, given the base's value before the change.

    None if the view is the base itself, or if the IR has no such operation.
    """
    op = view.op
    if (span := _span(view)) is not None:
        name, place = span
        return Op(name=f"{name}_scatter", args=(before, now, *place), results=(made,))
    if op.name in _RESHAPES:
        return Op(name="reshape", args=(now, made.type.shape), results=(made,))
    if op.name == "permute":
        order = op.args[1]
        assert isinstance(order, tuple)
        dims = [dim % len(order) for dim in order if isinstance(dim, int)]
        return Op(name="permute", args=(now, tuple(map(dims.index, range(len(dims))))), results=(made,))
    if op.name in _TRANSPOSES:
        return Op(name=op.name, args=(now, *op.args[1:]), results=(made,))
    if op.name == "movedim" and len(op.args) == 3:
        return Op(name="movedim", args=(now, op.args[2], op.args[1]), results=(made,))
    return None


def _span(view: _View) -> tuple[str, tuple[Arg, ...]] | None:
    """A view as a slice, a row (select) or a diagonal of its base: the name and the operands after the first."""
    op = view.op
    named = dict(op.attrs)
    dim = named.get("dim", 0)
    if op.name in ("slice", "select"):
        return op.name, op.args[1:]
    if op.name == "narrow":
        _, along, start, length = op.args
        if not isinstance(start, int) or not isinstance(length, int):
            return None
        end = start + length
        return "slice", (along, start, None if start < 0 <= end else end, 1)
    if op.name == "diagonal":
        given = (*op.args[1:], *(0, 0, 1)[len(op.args) - 1 :])
        return "diagonal", tuple(
            named.get(key, arg) for key, arg in zip(("offset", "dim1", "dim2"), given, strict=True)
        )
    if op.name == "unbind":
        return "select", (op.args[1] if len(op.args) > 1 else dim, view.index)
    if op.name in _SPANS:
        along = op.args[2] if len(op.args) > 2 else dim
        assert isinstance(along, int)
        ends = [0]
        for value in op.results:
            ends.append(ends[-1] + value.type.shape[along])
        return "slice", (along, ends[view.index], ends[view.index + 1], 1)
    return None


def _recorded(op: Op) -> Op:
    """An operation without the marks of changes."""
    return replace(op, attrs=tuple(item for item in op.attrs if item[0] not in _MARKS))


def _functional(op: Op) -> Op:
    """The functional form of an in-place operation."""
    if op.name == "bernoulli_" and len(op.args) < 2 and "p" not in dict(op.attrs):
        op = replace(op, args=(*op.args, 0.5))  # traces omit the default p; bernoulli(x) would take x as probabilities
    return replace(op, name=_FUNCTIONAL.get(op.name, op.name.removesuffix("_")))


def _functional_type(op: Op, types: Mapping[str, TensorType]) -> DType | None:
    """The element type of an operation's result; None if all operands have it."""
    if op.name not in _COMPARISONS and len({types[name].dtype for name in op.refs()}) == 1:
        return None
    known = {name: torch.empty(types[name].shape, dtype=DTYPES[types[name].dtype], device="meta") for name in op.refs()}
    args, options = torch_arguments(_recorded(op), known)
    made = torch_operator(op.name)(*args, **options)
    return DTYPE_NAMES[made.dtype]


def _live(graph: Graph, types: Mapping[str, TensorType], trained: Collection[str]) -> set[str]:
    """The values whose gradient reaches `trained` weights, also through changes in place."""
    live, makers = set(trained), graph.makers()
    for op in graph.ops:
        if not effects(op.name).differentiable or live.isdisjoint(op.refs()):
            continue
        live.update(value.name for value in op.results if value.type.differentiable)
        name = next(op.refs()) if is_change(op) and (NO_GRAD, True) not in op.attrs else ""
        while name:
            live.add(name)
            maker = makers.get(name)
            shown = maker is not None and maker.name != "detach" and (is_change(maker) or shares_memory(maker, types))
            name = next(maker.refs(), "") if maker is not None and shown else ""
    return live


def _owners(graph: Graph, types: Mapping[str, TensorType]) -> dict[str, str]:
    """The value whose memory each view, and each result of a change in place, has."""
    owners: dict[str, str] = {}
    for op in graph.ops:
        first = next(op.refs(), None)
        if first is not None and (is_change(op) or shares_memory(op, types)):
            owners.update(dict.fromkeys((value.name for value in op.results), owners.get(first, first)))
    return owners


def _last_reads(graph: Graph) -> dict[str, int]:
    """The index of each value's last reader; the graph's outputs are read at the end."""
    found = {name: index for index, op in enumerate(graph.ops) for name in op.refs()}
    return found | dict.fromkeys(graph.outputs, len(graph.ops))
