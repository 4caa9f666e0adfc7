"""Split a joint forward and backward fx graph into a region's two IR graphs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from partc import fuel
from partc.errors import InternalError, Source
from partc.ir.collectives import COLLECTIVES
from partc.ir.fx_calls import operation
from partc.ir.gradients import reached
from partc.ir.layout import Sizes, SubDim
from partc.ir.naming import gradient_name, gradient_owner, is_gradient
from partc.ir.operations import RANDOM, effects
from partc.ir.operators import DTYPE_NAMES
from partc.ir.program import Arg, DTypeArg, Graph, Op, Ref, Region, TensorType, Value, needed
from partc.passes.differentiate.forms import RESHAPES, canonical, filled, filling
from partc.passes.differentiate.products import with_cheaper_products
from partc.rules.inference import Inferred, inferred, local
from partc.rules.rule import integers

# Operations that return their operand, such as reshards of which only the transpose moves data.
_NOTHING = frozenset(
    {"detach", "alias", "clone", "contiguous", "lift_fresh_copy", "mark", "mark_grad", "vary", "settle"}
)
_RELAID = "relaid"  # marks of gradients that equal one of another layout
# Operations that compute zeros if all their operands are zeros.
_LINEAR = frozenset(COLLECTIVES) | {
    "linear_grad_bias", "take", "put", "neg", "add", "sub", "sum", "expand", "permute", "t", "transpose", "_to_copy",
    "stack", "cat", "slice", "select", "unbind", "split", "split_with_sizes", "squeeze", "unsqueeze", "slice_backward",
    "select_backward", "index_select", "repeat", "flip", "roll",
}  # fmt: skip


def split(traced: fx.Graph, region: Region, roots: frozenset[str], live: set[str], sizes: Sizes) -> Region:
    """The region with `forward`, `saved` and `backward` from the joint graph `traced`.

    `traced` takes the region's inputs, its params and a gradient for each output in `live`. It returns the outputs,
    then the gradients of inputs and params (None where there is none). Raises InternalError if the gradient of one of
    `roots` is lost on the way.
    """
    nodes = list(traced.nodes)
    arguments = [value.name for value in (*region.forward.inputs, *region.params)]
    placeholders = [node for node in nodes if node.op == "placeholder"]
    results = list(next(node for node in nodes if node.op == "output").args[0])
    outputs, gradients = results[: len(region.forward.outputs)], results[len(region.forward.outputs) :]
    tangents = placeholders[len(arguments) :]
    carrying = [name for name in region.forward.outputs if name in live]
    if len(tangents) != len(carrying):
        raise InternalError(f"{region.name}: {len(tangents)} incoming gradients for {len(carrying)} outputs")
    given = dict(zip(placeholders, arguments, strict=False))
    starts = (*tangents, *_own_gradients(nodes, region, given))
    behind = _dependents(nodes, starts)
    zeros = _zero_nodes(nodes, behind)
    wanted = _wanted(region, dict(zip(arguments, gradients, strict=False)), roots, behind | zeros)

    reader = _Reader(region, sizes, behind, zeros)
    reader.claim_all(zip(placeholders, arguments, strict=False))
    reader.claim_all(zip(tangents, (gradient_name(name) for name in carrying), strict=True))
    reader.part_layouts(nodes)
    reader.claim_all((node, gradient_name(name)) for name, node in wanted.items())
    reader.name(nodes)
    incoming = tuple(Value(name=gradient_name(name), type=_gradient(reader.types[name])) for name in carrying)
    ops = with_cheaper_products(reader.read(nodes, incoming), reader.fresh)

    found = tuple(reader.name_of(node) for node in outputs)
    # A value that is returned twice, or an input with a gradient defined by the model, has a second name, because the
    # gradients under the two names differ.
    pairs = tuple(zip(region.forward.outputs, found, strict=True))
    reaching = {name for pair in pairs for name in pair if not live.isdisjoint(pair)}
    again = {
        was: now for was, now in pairs if was != now and (now in wanted or (now in reaching and found.count(now) > 1))
    }
    ops = (*ops, *(reader.alias(was, now) for was, now in again.items()))
    returned = tuple(was if was in again else now for was, now in pairs)
    # Values that equal each other here may have differed in gradients, such as a value and its detached copy.
    forward, same = _merged(needed(ops, returned), reader.types, kept=frozenset(returned))
    ops = tuple(op.renamed(same) for op in ops)
    origins = ((name, reader.name_of(node)) for name, node in wanted.items())
    sources = {name: same.get(origin, origin) for name, origin in origins}
    backward, finals = _backward(ops, forward, sources, reader, given=frozenset(arguments))
    saved = _saved((*backward, *finals), tuple(gradient_name(name) for name in wanted), region, incoming)
    values = {value.name: value for op in ops for value in op.results} | {v.name: v for v in region.forward.inputs}
    graph = Graph(
        inputs=(*incoming, *(values[name] for name in saved)),
        ops=(*backward, *finals),
        outputs=tuple(gradient_name(name) for name in wanted),
    )
    return replace(
        region,
        forward=replace(region.forward, ops=forward, outputs=returned),
        saved=saved,
        backward=_following(graph, region.forward.outputs, returned),
    )


def _following(graph: Graph, outputs: tuple[str, ...], returned: tuple[str, ...]) -> Graph:
    """Rename incoming gradients after the outputs of the final forward graph.

    The names differ if the last reshard does not move data: `return loss_tp` became `return loss`.
    """
    names: dict[str, str] = {}
    for was, now in zip(outputs, returned, strict=True):
        old, new = gradient_name(was), gradient_name(now)
        if was != now and old not in names and new not in (*names, *graph.outputs):
            names |= {old: new, new: old}
    return Graph(
        inputs=tuple(replace(value, name=names.get(value.name, value.name)) for value in graph.inputs),
        ops=tuple(op.renamed(names) for op in graph.ops),
        outputs=graph.outputs,
    )


def _wanted(
    region: Region, gradients: Mapping[str, fx.Node | None], roots: frozenset[str], known: Set[fx.Node]
) -> dict[str, fx.Node]:
    """The gradients to return, by the name of their input or parameter.

    An unused parameter has none. `known` are the nodes that depend on incoming gradients or on ones that the model
    defines itself, and those of zeros. Others are refused: training would silently be wrong (nll_loss on meta tensors
    loses its gradient in this way).
    """
    wanted = {name: node for name, node in gradients.items() if name in roots and node is not None}
    for name, node in wanted.items():
        if node not in known:
            raise InternalError(f"{region.name}: the gradient of {name} depends on no gradient of an output")
    lost = [name for name in roots & _carriers(region, roots) if name not in wanted]
    if lost:
        raise InternalError(f"{region.name}: {', '.join(sorted(lost))} lost the gradient on the way back")
    return wanted


def _own_gradients(nodes: Iterable[fx.Node], region: Region, given: Mapping[fx.Node, str]) -> Iterator[fx.Node]:
    """The gradients that a model defines itself, which need not depend on incoming ones; some are `given`."""
    names = {ref.name for op in region.forward.ops if op.name == "own_gradient" for ref in op.args[2]}  # type: ignore[union-attr]
    yield from (node for node in nodes if operation(node) == "mark" and node.args[1] in names)
    yield from (node for node, name in given.items() if name in names)


def _zero_nodes(nodes: Iterable[fx.Node], behind: Set[fx.Node]) -> frozenset[fx.Node]:
    """Nodes whose values are all zero: gradients of piecewise constant operations, and values computed from them.

    A derivative is linear in the incoming gradients, so values computed from gradients of zeros alone are zero.
    """
    found: set[fx.Node] = set()
    gradients: set[fx.Node] = set()  # those of zeros, and what derivatives compute from them
    for node in nodes:
        operands, number = node.all_input_nodes, filling(node)
        if number is None:
            zero = _is_linear(node) and found.issuperset(operands)
        else:
            zero = isinstance(number, int | float) and number == 0
        if (zero and operation(node) == "mark_grad") or (node not in behind and not gradients.isdisjoint(operands)):
            gradients.add(node)
        if zero or node in gradients:
            found.add(node)
    return frozenset(found)


def _is_linear(node: fx.Node) -> bool:
    """Whether a node computes zeros from zeros."""
    name = operation(node)
    plain = node.target is operator.getitem or name in _NOTHING or name in RESHAPES or name in _LINEAR
    return bool(node.all_input_nodes) and plain


def _carriers(region: Region, roots: frozenset[str]) -> set[str]:
    """The values through which an output's gradient must pass to reach a root, the roots included."""
    live = reached(region.forward, roots)
    found = live.intersection(region.forward.outputs)
    for op in reversed(region.forward.ops):
        if any(value.name in found for value in op.results):
            found.update(name for name in op.refs() if name in live)
    return found


def _dependents(nodes: Iterable[fx.Node], roots: Iterable[fx.Node]) -> set[fx.Node]:
    found = set(roots)
    for node in nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _backward(
    ops: tuple[Op, ...], forward: tuple[Op, ...], sources: Mapping[str, str], reader: _Reader, given: frozenset[str]
) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """The operations of the backward graph, and the renames that finish it.

    `sources` are the gradients to return, by the name of their input or parameter. Values that the forward pass
    computes from constants are computed again, not saved.
    """
    made = {value.name for op in forward if any(True for _ in op.refs()) for value in op.results}
    merged, same = _merged(needed(ops, sources.values(), given=made | given), reader.types)
    sources = {name: same.get(source, source) for name, source in sources.items()}
    finals = tuple(
        Op(
            name="alias",
            args=(Ref(source),),
            results=(Value(name=gradient_name(name), type=_gradient(reader.types[name])),),
        )
        for name, source in sources.items()
        if source != gradient_name(name)
    )
    return merged, finals


def _merged(
    ops: Iterable[Op], types: Mapping[str, TensorType], *, kept: Set[str] = frozenset()
) -> tuple[tuple[Op, ...], dict[str, str]]:
    """Merge equal operations, such as those that compute the gradients of both factors of `x * x`. Also replace
    `where(test, x, x)` by `x`: a branch that passes no gradients to `x` when it is not taken reads it by such a choice.

    Operations with a result in `kept` are left. `types` are those of the forward values. Returns the operations that
    are left, and the remaining name of each value that was merged.
    """
    known: dict[tuple[object, ...], tuple[str, ...]] = {}
    same: dict[str, str] = {}
    left: list[Op] = []
    for op in ops:
        op = op.renamed(same)
        made = first = tuple(value.name for value in op.results)
        if op.name not in RANDOM and not op.body and kept.isdisjoint(made):
            match op.name, op.args:
                case "where", (_, Ref(one), Ref(other)) if one == other and types.get(one) == op.result.type:
                    first = (one,)
                case _:
                    first = known.setdefault(op.content, made)
        if first is made or not fuel.may_rewrite("equal operation", op.source):
            left.append(op)
        else:
            same.update(zip(made, first, strict=True))
    return tuple(left), same


def _saved(
    ops: tuple[Op, ...], outputs: tuple[str, ...], region: Region, incoming: tuple[Value, ...]
) -> tuple[str, ...]:
    """The values that the backward graph reads but neither computes nor receives, in the order of first use."""
    known = {value.name for op in ops for value in op.results}
    known.update(value.name for value in (*region.params, *incoming))
    read = dict.fromkeys(name for op in ops for name in op.refs())
    return tuple(name for name in (*read, *outputs) if name not in known)


def _gradient(type: TensorType) -> TensorType:
    return replace(type, layout=type.layout.dual())


class _Reader:
    """Translates fx nodes to IR operations, named by the marks."""

    def __init__(self, region: Region, sizes: Sizes, behind: Set[fx.Node], zeros: Set[fx.Node]) -> None:
        """`behind` are the nodes that depend on gradients, `zeros` those that consist of zeros."""
        self._zeros = zeros
        self.types = region.types(region.forward)
        self._sizes = sizes
        self._behind = behind
        self._sources = {value.name: op.source for op in region.forward.ops for value in op.results}
        self._names: dict[fx.Node, str] = {}
        self._holders: dict[str, fx.Node] = {}
        self._labels: dict[fx.Node, str] = {}
        # A gradient's name identifies its value: no other value may have it.
        self._taken: set[str] = {*self.types, *map(gradient_name, self.types)}
        self._gradients: dict[str, str] = {}  # name of a gradient -> the value to which it belongs
        self._known: set[str] = set()  # values whose layout is known from the forward pass
        self._made = dict(self.types)  # the types of all values that have been read

    def name_of(self, node: fx.Node) -> str:
        return self._names[_origin(node)]

    def alias(self, name: str, of: str) -> Op:
        """A forward value under another name."""
        return Op(name="alias", args=(Ref(of),), results=(Value(name=name, type=self.types[name]),))

    def claim_all(self, claims: Iterable[tuple[fx.Node, str]]) -> None:
        """Give nodes these names, unless the values behind them are named already."""
        for node, name in claims:
            if _origin(node) not in self._names:
                self._names[_origin(node)] = name
                self._holders.setdefault(name, _origin(node))
                self._taken.add(name)

    def part_layouts(self, nodes: Iterable[fx.Node]) -> None:
        """Flag the marks of gradients that equal one of another layout, and so are values of their own: the gradient of
        `repeat` with one copy on each rank is the copies' for its result, and a contribution to the operand's.
        """
        known: dict[fx.Node, TensorType | None] = {}
        for node in (node for node in nodes if operation(node) == "mark_grad"):
            origin, mine = _origin(node), self.types[str(node.args[1])]
            first = self._gradient_type(self._names[origin]) if origin in self._names else mine
            other = known.setdefault(origin, first)
            if other is not None and self._cuts(other) != self._cuts(mine):
                node.meta[_RELAID], known[node] = True, mine

    def _cuts(self, type: TensorType) -> tuple[tuple[SubDim, ...], ...]:
        return type.layout.normalized(self._sizes).dims

    def name(self, nodes: list[fx.Node]) -> None:
        """Name every node: by its mark, else after the next named value that depends on it.

        Forward values are named after forward values; those that only derivatives read, by their operations.
        """
        for node in nodes:
            if operation(node) in ("mark", "mark_grad"):
                name = str(node.args[1])
                self.claim_all([(node, self._gradient_name(name, node) if operation(node) == "mark_grad" else name)])
        for node in reversed(nodes):
            heirs = [self._labels[user] for user in node.users if user in self._labels]
            if node not in self._behind:
                heirs.sort(key=is_gradient)
            self._labels[node] = self._names.get(_origin(node), next(iter(heirs), "value"))
        for node in nodes:
            if node.op == "call_function" and _origin(node) not in self._names and not _is_tuple(node):
                self._names[_origin(node)] = self.fresh(self._unmarked_name(_origin(node)))

    def _gradient_name(self, name: str, node: fx.Node) -> str:
        """The name of a value's gradient.

        The gradient of a partial sum is whole on every rank: `grad_y_full` for `y_partial`. If the region also reads an
        output, its gradient is the incoming one plus others: a `_total`.
        """
        whole = f"{name.removesuffix('_partial')}_full" if name.endswith("_partial") else name
        found = gradient_name(whole)
        holder = self._holders.setdefault(found, _origin(node))
        if holder is not _origin(node) and _origin(node) not in self._names:
            found = self.fresh(f"{found}_total")
        self._gradients.setdefault(found, name)
        return found

    def _unmarked_name(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            call, index = _item(node)
            first = next((user for user in call.users if user.target is operator.getitem and user.args[1] == 0), None)
            extras = effects(operation(call)).extra
            if first in self._names and 0 < index <= len(extras):
                return f"{self._names[first]}_{extras[index - 1]}"
        if node not in self._behind and is_gradient(self._labels[node]):
            return operation(_item(node)[0] if node.target is operator.getitem else node)
        return self._labels[node]

    def fresh(self, stem: str) -> str:
        name, count = stem, 0
        while name in self._taken:
            count += 1
            name = f"{stem}_{count}"
        self._taken.add(name)
        return name

    def read(self, nodes: list[fx.Node], incoming: Iterable[Value]) -> tuple[Op, ...]:
        """The operations of all nodes; `incoming` are the gradients of the outputs."""
        self._made.update((value.name, value.type) for value in incoming)
        ops = [
            self._operation(node)
            for node in nodes
            if node.op == "call_function" and node.target is not operator.getitem and _origin(node) is node
            if "val" in node.meta  # an assertion has no result
        ]
        return tuple(self._settled(ops))

    def _settled(self, ops: Sequence[Op]) -> Iterator[Op]:
        """The operations; a doubtful layout whose permutation is known from the forward pass follows from it."""
        known = {
            next(op.refs()): (op.result.type.layout, integers(op.args[1]))
            for op in ops
            if op.name == "permute" and op.result.name in self._known
        }
        for op in ops:
            name = op.results[0].name
            if name in known and name not in self._known and op.name == "reshape":
                layout, order = known[name]
                before = replace(layout, dims=tuple(layout.dims[order.index(dim)] for dim in range(len(order))))
                (made,) = inferred(op, self._made, self._sizes)
                if made is not None and made.doubtful and made.allows(before, self._sizes):
                    op = op.laid_out((before,))
                    self._made[name] = op.result.type
            yield op

    def _operation(self, node: fx.Node) -> Op:
        values = self._results(node)
        name, args, attrs = canonical(node, self._arg)
        op = replaced = Op(name=name, args=args, attrs=attrs, results=values)
        if node in self._zeros and _is_linear(node) and not _is_tuple(node):
            name, args, attrs = filled(node.meta["val"], 0)  # zeros may have the layout of any gradient
            op = Op(name=name, args=args, attrs=attrs, results=values)
        results = self._laid_out(op, self._heir(node), replaced)
        if effects(name).extra or len(results) > 1:
            source = next((self._sources[value.name] for value in results if value.name in self._sources), None)
        else:
            source = self._source(results[0].name, node)
        given = (self._source(self._names[_origin(other)], _origin(other)) for other in node.all_input_nodes)
        source = source or next(filter(None, given), None)
        return replace(op, results=results, source=source)

    def _heir(self, node: fx.Node) -> str:
        """A value whose layout the results may share: a gradient only for constants and dependents of gradients."""
        label = self._labels[node]
        return label if label in self.types or node in self._behind or not node.all_input_nodes else ""

    def _laid_out(self, op: Op, heir: str, replaced: Op) -> tuple[Value, ...]:
        """The results with their layouts: known from the forward pass, or inferred from the operation, which may be a
        constant in place of another operation.
        """
        found = inferred(op, self._made, self._sizes)
        before = found if op is replaced else inferred(replaced, self._made, self._sizes)
        operands = [self._made[name] for name in op.refs()]
        results = tuple(
            value if value.name in self._known else replace(value, type=self._of(value, made, heir, operands, own))
            for value, made, own in zip(op.results, found, before, strict=True)
        )
        self._made.update((value.name, value.type) for value in results)
        return results

    def _of(
        self,
        value: Value,
        made: Inferred | None,
        heir: str,
        operands: Sequence[TensorType],
        before: Inferred | None,
    ) -> TensorType:
        like = self._gradient_type(heir)
        if made is not None and like is not None and not made.layout.local:
            same = like.layout.local_shape(self._sizes) == value.type.shape
            if same and made.allows(like.layout, self._sizes):
                return replace(value.type, layout=like.layout)
        if before is not None and not before.layout.local:
            made = before
        found = local(value.type.shape, operands) if made is None else made.layout
        return replace(value.type, layout=found.normalized(self._sizes))

    def _source(self, name: str, node: fx.Node) -> Source | None:
        label = self._labels.get(node, name)
        belongs = self._gradients.get(label, gradient_owner(label))
        return self._sources.get(name) or self._sources.get(belongs)

    def _results(self, node: fx.Node) -> tuple[Value, ...]:
        if not _is_tuple(node):
            return (self._value(self._names[node], node.meta["val"]),)
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        label = self._labels[node]
        known = next(val for val in node.meta["val"] if val is not None)
        return tuple(
            self._value(
                self._names[_origin(items[i])] if i in items else self.fresh(f"{label}_unused"),
                known.new_empty(()) if val is None else val,  # a gradient that was not requested
            )
            for i, val in enumerate(node.meta["val"])
        )

    def _value(self, name: str, tensor: torch.Tensor) -> Value:
        shape, dtype = tuple(tensor.shape), DTYPE_NAMES[tensor.dtype]
        known = self._gradient_type(name)
        if known is None:
            return Value(name=name, type=TensorType.replicated(dtype, shape))
        if known.layout.local_shape(self._sizes) != shape:
            raise InternalError(f"{name} has local shape {shape}, its layout {known} says otherwise")
        self._known.add(name)
        value = Value(name=name, type=replace(known, dtype=dtype))
        self._made.setdefault(name, value.type)
        return value

    def _gradient_type(self, name: str) -> TensorType | None:
        """The type of a forward value or of its gradient, by name; None for other names."""
        if name in self.types:
            return self.types[name]
        owner = self._gradients.get(name, gradient_owner(name))
        return _gradient(self.types[owner]) if owner in self.types else None

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            return Ref(self.name_of(arg))
        if isinstance(arg, torch.dtype):
            return DTypeArg(DTYPE_NAMES[arg])
        if isinstance(arg, list | tuple):
            return tuple(self._arg(item) for item in arg)
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        raise InternalError(f"an operation's argument has no place in the IR: {arg!r}")


def _item(node: fx.Node) -> tuple[fx.Node, int]:
    """The call whose result a getitem selects, and the index of the result."""
    call, index = node.args[:2]
    if not isinstance(call, fx.Node) or not isinstance(index, int):
        raise InternalError(f"{node.name} does not select a result")
    return call, index


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _origin(node: fx.Node) -> fx.Node:
    """The node whose value this one returns unchanged."""
    while (source := _unchanged(node)) is not None:
        node = source
    return node


def _unchanged(node: fx.Node) -> fx.Node | None:
    """The earlier node whose value this one has: its operand, or the part that was gathered and is cut out again. None
    if the node computes a new value.
    """
    name, (operand, *rest) = operation(node), (*node.args, None)
    if not isinstance(operand, fx.Node) or node.meta.get(_RELAID):
        return None
    if name in _NOTHING or (name == "pow" and rest[0] == 1 and node.meta["val"].dtype == operand.meta["val"].dtype):
        return operand
    gathered = _origin(operand) if name == "take" else None  # a rank's own part of a gathered tensor
    if gathered is not None and operation(gathered) == "all_gather" and gathered.args[1:] == node.args[1:]:
        return gathered.args[0]  # type: ignore[return-value]
    return None
