"""Move the sequence dimension outermost around gathers and scatters, so that the ranks' parts are contiguous.

    norm_full    = all_gather(norm, dim=1, …)
    up           = linear(norm_full, up.weight, up.bias)
    gelu         = gelu(up)
    …            = linear(gelu, down.weight)
    down_product = reduce_scatter(…, dim=1, …)
  ->
    norm_t         = permute(norm, (1, 0, 2))
    norm_full      = all_gather(norm_t, dim=0, …)
    up             = linear(norm_full, up.weight, up.bias)
    gelu           = gelu(up)
    …              = linear(gelu, down.weight)
    down_product_t = reduce_scatter(…, dim=0, …)
    down_product   = permute(down_product_t, (1, 0, 2))

Collectives move contiguous memory. Along the second dimension of a larger tensor, the result of a gather and the
operand of a scatter are copied once more, as a whole. After the rewrite, a gather copies only the rank's own part, and
a scatter copies nothing. The operations between the two work on rows in any order, or absorb the transposition into a
permutation. If any other operation reads the values in between, they stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from partc import fuel
from partc.ir.layout import Sizes
from partc.ir.naming import unique
from partc.ir.program import Arg, Graph, Op, Program, Ref, Region, TensorType, Value
from partc.rules import is_elementwise
from partc.rules.rule import integers

_TURN = {0: 1, 1: 0}  # the first two dimensions change places
_SEEDS = ("all_gather", "reduce_scatter")


def outermost(program: Program) -> Program:
    """Rewrite the forward graph of every region; backward graphs are derived from it later."""
    return replace(program, regions=tuple(_region(region, program.sizes) for region in program.regions))


def _region(region: Region, sizes: Sizes) -> Region:
    types = region.types(region.forward)
    found = _Permutations(region.forward, types, sizes)
    transposed: set[str] = set()
    for op in region.forward.ops:
        if found.is_seed(op) and (around := found.around(op)) and fuel.may_rewrite("sequence first", op.source):
            transposed |= around
    return replace(region, forward=_rewritten(region.forward, transposed, types, found)) if transposed else region


@dataclass(slots=True)
class _Permutations:
    """Sets of values that can be transposed together."""

    graph: Graph
    types: Mapping[str, TensorType]
    sizes: Sizes

    def is_seed(self, op: Op) -> bool:
        """Whether the collective causes a copy: it works along dimension 1, and dimension 0 is larger than 1."""
        if op.name not in _SEEDS:
            return False
        where, shape = dict(op.attrs), self._shape(next(op.refs()))
        is_second = (where["dim"], where.get("outer", 1)) == (1, 1) and len(shape) > 2
        return is_second and shape[0] > 1 and self.sizes[str(where["axis"])] > 1

    def around(self, seed: Op) -> set[str]:
        """The values that are transposed together with the collective's; empty if one of them cannot be."""
        makers = self.graph.makers()
        first = seed.result.name if seed.name == "all_gather" else next(seed.refs())
        found, waiting = {first}, [first]
        while waiting:
            name = waiting.pop()
            if name in self.graph.outputs or name not in makers or len(self._shape(name)) < 2:
                return set()
            near = [makers[name], *(op for op in self.graph.ops if name in op.refs())]
            for place, op in enumerate(near):
                more = self._transposed_with(op, makes=place == 0)
                if more is None:
                    return set()
                waiting.extend(more - found)
                found |= more
        return found

    def _transposed_with(self, op: Op, *, makes: bool) -> set[str] | None:
        """The other values of an operation that are transposed if one of them is; None if the operation needs its
        order.
        """
        if op.name == "permute" or (self.is_seed(op) and makes == (op.name == "all_gather")):
            return set()
        results = {value.name for value in op.results}
        match op.name:
            case "linear":
                return results | {next(op.refs())}
            case "matmul" if len(self._shape([*op.refs()][1])) == 2:
                return results | {next(op.refs())}
            case "split" if int(integers(op.args[2])[0] if isinstance(op.args[2], tuple) else op.args[2]) > 1:  # type: ignore[arg-type]
                return results | {*op.refs()}
            case "slice" if isinstance(op.args[1], int) and op.args[1] > 1:
                return results | {*op.refs()}
            case "reshape":
                before, after = self._shape(next(op.refs())), self._shape(op.result.name)
                return results | {*op.refs()} if before[:2] == after[:2] else None
        if is_elementwise(op.name):
            return self._elementwise(op, results)
        return None

    def _elementwise(self, op: Op, results: set[str]) -> set[str] | None:
        whole, found = self._shape(op.result.name), results
        for name in op.refs():
            shape = self._shape(name)
            if shape[:2] == whole[:2] and len(shape) == len(whole):
                found = found | {name}
            elif len(shape) > len(whole) - 2 and set(shape[: len(shape) - len(whole) + 2]) != {1}:
                return None
        return found

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.types[name].layout.local_shape(self.sizes)


def _rewritten(graph: Graph, transposed: set[str], types: Mapping[str, TensorType], turns: _Permutations) -> Graph:
    taken = {*types}
    ops: list[Op] = []
    for op in graph.ops:
        reads, makes = not transposed.isdisjoint(op.refs()), any(value.name in transposed for value in op.results)
        results = tuple(_transposed(value) if value.name in transposed else value for value in op.results)
        if not reads and not makes:
            ops.append(op)
        elif op.name == "all_gather":
            [name] = op.refs()
            part = _transposed(Value(name=unique(f"{name}_t", taken), type=types[name]))
            ops.append(_permutation(name, part, op))
            ops.append(replace(op, args=(Ref(part.name),), attrs=_outermost(op), results=results))
        elif op.name == "reduce_scatter" and not makes:
            part = replace(_transposed(op.result), name=unique(f"{op.result.name}_t", taken))
            ops.append(replace(op, attrs=_outermost(op), results=(part,)))
            ops.append(_permutation(part.name, op.result, op))
        elif op.name == "permute":
            order: Iterable[int] = integers(op.args[1])
            order = [_TURN.get(dim, dim) if reads else dim for dim in order]
            order = (order[1], order[0], *order[2:]) if makes else tuple(order)
            ops.append(replace(op, args=(op.args[0], tuple(order)), results=results, choices=()))
        else:
            args = op.args
            if op.name == "reshape":
                shape = integers(op.args[1])
                args = (op.args[0], (shape[1], shape[0], *shape[2:]))
            ops.append(replace(op, args=args, results=results, choices=()))
    return replace(graph, ops=tuple(ops))


def _transposed(value: Value) -> Value:
    first, second, *rest = value.type.layout.dims
    return replace(value, type=replace(value.type, layout=replace(value.type.layout, dims=(second, first, *rest))))


def _permutation(name: str, result: Value, op: Op) -> Op:
    order: tuple[Arg, ...] = (1, 0, *range(2, len(result.type.shape)))
    return Op(name="permute", args=(Ref(name), order), results=(result,), source=op.source)


def _outermost(op: Op) -> tuple[tuple[str, Arg], ...]:
    return tuple((key, 0 if key == "dim" else value) for key, value in op.attrs)
