"""Loops over experts, rewritten as one computation of every row with the weights of its expert.

A loop is a chain of writes to one tensor; equal operations compute the written rows for every expert. `Lift` walks
through the operations of all experts at once. It distinguishes four kinds of values:

    shared     the same value for all experts
    stacked    one value for each expert, as a tensor with a first dimension for experts: weights, masks
    selected   the places that the expert's mask selects
    rows       one row for each element of the mask, computed for the row's own expert

The masks of the experts have to come from one tensor of expert numbers (a witness), so that each row has one expert:
`chosen == e`, or row `e` of `one_hot(chosen)`. With `(chosen == e).any(-1)` a token has a row for each of its slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from partc import fuel
from partc.ir.naming import unique
from partc.ir.operations import KEEPING, RANDOM
from partc.ir.program import SELECTED, Arg, DTypeArg, Graph, Op, Ref, Region, TensorType, Value, makers, needed
from partc.passes.route.rows import RowWriter, dims_of_rows, names_of
from partc.passes.route.writes import Distinct, Write, write_of
from partc.rules import is_elementwise
from partc.rules.rule import argument, integers

LEAST = 2  # experts
_TRUE = frozenset({"ne", "gt"})  # comparisons with 0 that turn numbers into a mask
_BOTH = frozenset({"mul", "logical_and", "bitwise_and", "__and__"})


def without_loops(region: Region) -> tuple[Graph, bool]:
    """The forward graph with expert products in place of loops over experts, and whether these loops draw random
    numbers.
    """
    graph, draws = region.forward, False
    params = {value.name: value.type for value in region.params}
    graph = _without_never(graph, params)
    for chain in _chains(graph):
        for part in _counted(chain, graph):
            if len(part) < LEAST or not fuel.may_rewrite("loop over experts", part[-1].source):
                continue
            types = {**params, **graph.types()}
            lift = Lift(graph.makers(), types, params, len(part))
            try:
                lift.written(part)
            except NotEqualError:
                continue
            graph = _with_lifted(graph, lift, part[-1])
            draws |= any(op.name in RANDOM for op in lift.writer.ops)
    return graph, draws


def _without_never(graph: Graph, params: Mapping[str, TensorType]) -> Graph:
    """The graph without writes for experts that no row can choose: rows `e` of one_hot(chosen, n) with e too large."""
    lift = Lift(graph.makers(), {**params, **graph.types()}, params, 0)
    same: dict[str, str] = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = op.with_operands(same)
        write = write_of(op, lift.makers)
        if write is not None and write.into not in lift.makers[write.places[0]].refs() and lift.never(write.places[0]):
            same[op.result.name] = write.into
        else:
            ops.append(op)
    return graph.rewritten(ops, same)


class NotEqualError(Exception):
    """The experts' computations differ, or mix rows."""


def _chains(graph: Graph) -> list[list[Write]]:
    """The chains of consecutive writes into one tensor."""
    makers = graph.makers()
    found: dict[str, list[Write]] = {}  # last result -> the chain
    for op in graph.ops:
        write = write_of(op, makers)
        if write is not None:
            chain = found.pop(write.into, [])
            if chain and chain[-1].adds != write.adds:
                chain = []
            found[op.result.name] = [*chain, write]
    return list(found.values())


def _counted(chain: Sequence[Write], graph: Graph) -> Iterator[list[Write]]:
    """The parts of a chain in which the expert's number counts up from 0."""
    makers = graph.makers()
    part: list[Write] = []
    for write in chain:
        mask = next(makers[write.places[0]].refs())
        if part and _starts(mask, next(makers[part[0].places[0]].refs()), makers):
            yield part
            part = []
        part.append(write)
    yield part


def _starts(mask: str, first: str, makers: Mapping[str, Op]) -> bool:
    """Whether a mask compares with the same numbers as the first mask of its part, so that a new part starts."""
    return _numbers(mask, makers) == _numbers(first, makers)


def _numbers(name: str, makers: Mapping[str, Op]) -> tuple[object, ...]:
    """The literal arguments of the operations that compute a mask, a few steps back, and the places of results."""
    found: list[object] = []
    for _ in range(6):
        op = makers.get(name)
        if op is None:
            break
        place = [value.name for value in op.results].index(name)
        found.append((op.name, place, tuple(arg for arg in op.args if isinstance(arg, int))))
        name = next(op.refs(), "")
    return tuple(found)


def _with_lifted(graph: Graph, lift: Lift, last: Write) -> Graph:
    """The graph with the lifted operations instead of the loop, at the place of the last write."""
    ops: list[Op] = []
    for op in graph.ops:
        ops.extend(lift.writer.ops if op is last.op else (op,))
    return replace(graph, ops=needed(tuple(ops), graph.outputs))


@dataclass(frozen=True, slots=True)
class Lifted:
    """A value of all experts: `kind` is shared, stacked, selected or rows."""

    kind: str
    name: str = ""
    dim: int = 0  # selected: the mask's dimension; rows: the dimension of the rows


@dataclass(frozen=True, slots=True)
class _Witness:
    """The expert numbers behind a stacked mask; their shape is the mask's, followed by its slots.

    `exact`: the mask of expert e is set wherever the number is e, not only at some of these places.
    """

    name: str
    slots: tuple[int, ...] = ()
    exact: bool = True


@dataclass(slots=True)
class Lift:
    """Lifts the operations of a loop from one expert to all experts."""

    makers: Mapping[str, Op]
    types: dict[str, TensorType]
    params: Mapping[str, TensorType]
    count: int
    writer: RowWriter = field(init=False)
    known: dict[tuple[str, ...], Lifted] = field(default_factory=dict)
    witnesses: dict[str, _Witness] = field(default_factory=dict)  # stacked mask -> its expert numbers
    masks: tuple[str, ...] = ()  # one for each expert
    whole: tuple[int, ...] = ()  # the shape of which each element has a row: the mask's dimensions and the slots
    first: int = 0  # the mask's dimension that comes first in the order of the rows
    experts: str = ""  # the value with the number of each row's expert
    chosen: str = ""  # the mask of rows that any expert selects; "" if all are selected

    def __post_init__(self) -> None:
        self.writer = RowWriter(types=self.types, taken=set(self.types))

    def _distinct(self) -> Distinct:
        return Distinct({**self.makers, **makers(self.writer.ops)}, self.types)

    def place(self, name: str) -> int:
        """The index of a value among the results of its operation."""
        return next(index for index, value in enumerate(self.makers[name].results) if value.name == name)

    # -- the whole loop ------------------------------------------------------------------------------

    def written(self, writes: Sequence[Write]) -> None:
        """Write the operations of a whole loop; the last one defines the result of the last write."""
        w, last = self.writer, writes[-1]
        w.source = writes[0].op.source
        masks, places = self._common_places(writes)
        self._select(masks, places)
        rows = self.lifted(tuple(write.rows for write in writes))
        if rows.kind != "rows" or rows.dim != 0:
            raise NotEqualError
        made, name, into = last.op.result, rows.name, writes[0].into
        if self.chosen:
            name = w.only(name, 0, self.chosen, made.name)
        rest = w.shape(name)[1:]
        if last.held:
            held = self.lifted(tuple(write.held for write in writes))
            if held.kind != "rows":
                raise NotEqualError
            place = w.only(held.name, 0, self.chosen, f"{made.name}_place") if self.chosen else held.name
            args = (Ref(into), 0, Ref(place), Ref(name))
            w.define("index_add", args, w.shape(into), w.types[into].dtype, made.name)
            return
        if w.shape(into) != (*(self.whole[dim] for dim in places), *rest):
            raise NotEqualError
        spread = self._spread(name, places, rest, made.name)
        dtype = w.types[into].dtype
        if last.adds:
            w.define("add", (Ref(into), Ref(spread)), w.shape(into), dtype, made.name)
            return
        if self._order(places) != tuple(range(len(self.whole))) or len(places) < len(self.whole):
            raise NotEqualError
        if not self.chosen:
            w.define("reshape", (Ref(spread), w.shape(into)), w.shape(into), dtype, made.name)
            return
        hit = w.reshape(self.chosen, (*self.whole, *(1 for _ in rest)), f"{made.name}_hit")
        w.define("where", (Ref(hit), Ref(spread), Ref(into)), w.shape(into), dtype, made.name)

    def _common_places(self, writes: Sequence[Write]) -> tuple[tuple[str, ...], list[int]]:
        """The mask of each write, and the dimensions of its places, which are the same for all writes.

        Raises NotEqualError unless each write continues the one before it.
        """
        for earlier, later in pairwise(writes):
            if later.into != earlier.op.result.name:
                raise NotEqualError
        masks = tuple(next(self.makers[write.places[0]].refs()) for write in writes)
        dims = [[self.makers[name].args[1] for name in write.places] for write in writes]
        same = all(each == dims[0] for each in dims) and len({not write.held for write in writes}) == 1
        if not same or any(next(self.makers[name].refs()) != mask for write, mask in zip(writes, masks, strict=True)
                           for name in write.places):  # fmt: skip
            raise NotEqualError
        places = [dim for dim in dims[0] if isinstance(dim, int)]
        distinct, others = self._distinct(), {*range(len(self.writer.shape(masks[0])))}.difference(places)
        for write, mask in zip(writes, masks, strict=True):
            if write.sums and not distinct.at_most_once(mask, others):
                raise NotEqualError
        return masks, places

    def _order(self, places: Sequence[int]) -> tuple[int, ...]:
        """The dimensions of `whole` in the order of the rows: dimensions that are written to come first."""
        return (*places, *(dim for dim in range(len(self.whole)) if dim not in places))

    def _spread(self, name: str, places: Sequence[int], rest: tuple[int, ...], stem: str) -> str:
        """The rows, summed into the shape of the tensor to which they are written."""
        w, order = self.writer, self.order
        sizes = [self.whole[dim] for dim in order]
        x = w.reshape(name, (*sizes, *rest), f"{stem}_spread")
        others = tuple(range(len(places), len(order)))
        if others:
            shape = (*sizes[: len(places)], *rest)
            x = w.add("sum", (Ref(x), others, False), shape, w.types[x].dtype, f"{stem}_sum")
        return x

    order: tuple[int, ...] = ()

    def _select(self, masks: tuple[str, ...], places: Sequence[int]) -> None:
        """Determine the expert of every row."""
        w = self.writer
        self.masks = masks
        mask = self.lifted(masks)
        witness = self.witnesses.get(mask.name)
        if mask.kind != "stacked" or witness is None:
            raise NotEqualError
        shape = w.shape(masks[0])
        self.whole = (*shape, *witness.slots)
        self.order = self._order(places)
        sizes = [self.whole[dim] for dim in self.order]
        rows = math.prod(sizes)
        numbers = w.permute(witness.name, self.order, "experts")
        self.experts = w.reshape(numbers, (rows,), "experts")
        bound = self._bound(witness.name)
        inside = bound is not None and bound <= self.count
        if not inside:
            below = w.add("lt", (Ref(self.experts), self.count), (rows,), "bool", "is_expert")
            above = w.add("ge", (Ref(self.experts), 0), (rows,), "bool", "is_expert")
            self.chosen = w.add("logical_and", (Ref(below), Ref(above)), (rows,), "bool", "is_expert")
            self.experts = w.add("clamp", (Ref(self.experts), 0, self.count - 1), (rows,), "i64", "experts")
        if not witness.exact:
            if witness.slots:
                raise NotEqualError
            own = self._of_rows(mask.name, range(len(shape)), range(len(shape)))
            if w.types[own].dtype != "bool":
                own = w.add("ne", (Ref(own), 0), (rows,), "bool", "is_routed")
            self.chosen = (
                own if inside else (w.add("logical_and", (Ref(own), Ref(self.chosen)), (rows,), "bool", "is_routed"))
            )

    def never(self, place: str) -> bool:
        """Whether a mask is row `e` of one_hot(chosen), and all numbers in `chosen` are below `e`."""
        row = self.makers.get(next(self.makers[place].refs()))
        while row is not None and row.name in ("reshape", "to"):
            row = self.makers.get(next(row.refs()))
        if row is None or row.name != "slice":
            return False
        _, dim, first, *_ = row.args
        assert isinstance(dim, int) and isinstance(first, int)
        self.count = self.writer.shape(next(row.refs()))[dim]
        found = self._one_hot(next(row.refs()), dim)
        bound = self._bound(found[0]) if found is not None else None
        return bound is not None and bound <= first

    def _bound(self, name: str) -> int | None:
        """An exclusive upper bound of non-negative expert numbers; None if none is known."""
        while (op := self.makers.get(name) or makers(self.writer.ops).get(name)) is not None:
            if op.name == "topk" and op.results[1].name == name:
                dim = argument(op, 2, "dim", -1)
                assert isinstance(dim, int)
                return self.writer.shape(next(op.refs()))[dim]
            if op.name == "argmax":
                dim = argument(op, 1, "dim")
                return self.writer.shape(next(op.refs()))[dim] if isinstance(dim, int) else None
            if op.name == "repeat_interleave":  # the number of each row's part; there is a part for each count
                return self.writer.shape(next(op.refs()))[0] if len(op.args) == 1 else None
            if op.name not in KEEPING and op.name not in ("slice", "split"):
                return None
            name = next(op.refs())
        return None

    # -- values ----------------------------------------------------------------------------------------

    def lifted(self, names: tuple[str, ...]) -> Lifted:
        found = self.known.get(names)
        if found is None:
            found = self.known[names] = self._make(names)
        return found

    def _make(self, names: tuple[str, ...]) -> Lifted:
        if len(set(names)) == 1:
            return Lifted("shared", names[0])
        if all(name in self.params for name in names):
            return self._stacked_weights(names)
        ops = [self.makers[name] for name in names if name in self.makers]
        first = ops[0] if ops else None
        if first is None or len(ops) < len(names):
            raise NotEqualError
        if first.name == "split" and len({(op.name, op.args) for op in ops}) == 1:
            return self._parts(first, names)
        if len(set(map(self.place, names))) > 1 or len({(op.name, len([*op.refs()])) for op in ops}) > 1:
            raise NotEqualError
        operands = [self.lifted(reads) for reads in zip(*(tuple(op.refs()) for op in ops), strict=True)]
        if first.name in RANDOM and not any(each.kind == "rows" for each in operands):
            raise NotEqualError
        if len({*map(_form, ops)}) > 1:
            return self._numbered(ops, operands)
        result = first.results[self.place(names[0])]
        if first.name == SELECTED:
            return self._places(ops)
        if any(each.kind == "selected" for each in operands):
            return self._read(first, result, operands)
        if any(each.kind == "rows" for each in operands):
            return self._rows(first, result, operands)
        if all(each.kind == "shared" for each in operands):
            return Lifted("shared", names[0])
        return self._stacked(first, result, operands)

    def _places(self, ops: Sequence[Op]) -> Lifted:
        dim = ops[0].args[1]
        if tuple(next(op.refs()) for op in ops) != self.masks or not isinstance(dim, int):
            raise NotEqualError
        return Lifted("selected", dim=dim)

    def _stacked_weights(self, names: tuple[str, ...]) -> Lifted:
        w = self.writer
        type = self.params[names[0]]
        if any(self.params[name] != type for name in names):
            raise NotEqualError
        stem = names[0]
        rows = tuple(Ref(w.add("reshape", (Ref(name), (1, *type.shape)), (1, *type.shape), type.dtype, f"{name}_one"))
                     for name in names)  # fmt: skip
        shape = (len(names), *type.shape)
        return Lifted("stacked", w.add("cat", (rows, 0), shape, type.dtype, f"{stem}_stacked"))

    def _numbered(self, ops: Sequence[Op], operands: Sequence[Lifted]) -> Lifted:
        """Operations that differ in the expert's number: rows of a shared tensor, or comparisons with it."""
        w, first = self.writer, ops[0]
        types = {tuple(value.type for value in op.results) for op in ops}
        if len(operands) != 1 or operands[0].kind != "shared" or len(types) > 1:
            raise NotEqualError
        x, shape = operands[0].name, w.shape(operands[0].name)
        numbers = tuple(range(self.count))
        if first.name == "slice":
            dim = first.args[1]
            assert isinstance(dim, int)
            size = first.result.type.shape[dim]
            if any(op.args[1:] != (dim, e * size, (e + 1) * size, 1) for e, op in enumerate(ops)):
                raise NotEqualError
            return self._divided(x, dim, size)
        if first.name == "eq" and tuple(op.args[1] for op in ops) == numbers:
            wide = w.reshape(x, (1, *shape), f"{x}_wide")
            numbered = w.add("arange", (self.count,), (self.count,), "i64", "experts_numbered", dtype=DTypeArg("i64"))
            numbered = w.reshape(numbered, (self.count, *(1 for _ in shape)), "experts_numbered")
            made = w.add("eq", (Ref(wide), Ref(numbered)), (self.count, *shape), "bool", f"{first.result.name}_stacked")
            self.witnesses[made] = _Witness(x)
            return Lifted("stacked", made)
        raise NotEqualError

    def _parts(self, op: Op, names: tuple[str, ...]) -> Lifted:
        """The parts of a split tensor, one for each expert, in order."""
        (x,), dim = op.refs(), op.args[2]
        parts = op.results[: self.count]
        assert isinstance(dim, int)
        in_order = [*map(self.place, names)] == [*range(len(parts))]
        if not in_order or len({value.type for value in parts}) > 1:
            raise NotEqualError
        return self._divided(x, dim, parts[0].type.shape[dim])

    def _divided(self, x: str, dim: int, size: int) -> Lifted:
        """The first parts of a shared tensor, each of `size` elements along a dimension, stacked by expert."""
        w, shape = self.writer, self.writer.shape(x)
        ahead, behind = shape[:dim], shape[dim + 1 :]
        if shape[dim] > self.count * size:
            short = (*ahead, self.count * size, *behind)
            x = w.add("slice", (Ref(x), dim, 0, self.count * size, 1), short, w.types[x].dtype, f"{x}_experts")
        made = w.reshape(x, (*ahead, self.count, size, *behind), f"{x}_experts")
        made = w.permute(made, (dim, *(i for i in range(len(shape) + 1) if i != dim)), f"{x}_experts")
        if size == 1:
            self._witness_of_rows(made, x, dim)
        return Lifted("stacked", made)

    def _witness_of_rows(self, stacked: str, x: str, dim: int) -> None:
        """Record the expert numbers of a stacked mask made from one_hot(chosen), whose dimension `dim` counts
        experts.
        """
        found = self._one_hot(x, dim)
        if found is None:
            return
        name, exact = found
        w = self.writer
        shape = tuple(size for i, size in enumerate(w.shape(x)) if i != dim)
        place = w.shape(stacked)[1:]
        value = w.reshape(name, shape, "experts")
        self.witnesses[stacked] = _Witness(w.reshape(value, place, "experts"), exact=exact)

    def _one_hot(self, x: str, dim: int) -> tuple[str, bool] | None:
        """The numbers of which x is a (possibly masked) one-hot encoding along `dim`, and whether it is unmasked; None
        for other values.
        """
        w, op = self.writer, self.makers.get(x) or makers(self.writer.ops).get(x)
        if op is None:
            return None
        shape, names = w.shape(x), list(op.refs())
        one = (*shape[:dim], 1, *shape[dim + 1 :])
        match op.name, op.args:
            case "eq", (Ref(), Ref()):
                return self._compared_numbers(names, len(shape) - dim, one)
            case _ if op.name in ("to", "detach") or (op.name in _TRUE and op.args[1] == 0):
                return self._one_hot(names[0], dim)
            case "slice", (_, int(along), int(first), *_):
                found = self._one_hot(names[0], dim)
                if found is None or along == dim:
                    return None if first else found
                return w.add("slice", (Ref(found[0]), *op.args[1:]), one, w.types[found[0]].dtype, "experts"), found[1]
            case "permute", (_, order):
                turned = integers(order)
                found = self._one_hot(names[0], turned[dim])
                return None if found is None else (w.permute(found[0], turned, "experts"), found[1])
            case "reshape", _:
                before, ahead = w.shape(names[0]), math.prod(shape[:dim])
                same = (i for i, size in enumerate(before) if size == shape[dim] and math.prod(before[:i]) == ahead)
                found = None if (place := next(same, None)) is None else self._one_hot(names[0], place)
                return None if found is None else (w.reshape(found[0], one, "experts"), found[1])
            case _, (Ref(), Ref()) if op.name in _BOTH:
                either = (self._one_hot(name, dim) for name in names if w.shape(name) == shape)
                found = next(filter(None, either), None)
                return None if found is None else (found[0], False)
        return None

    def _compared_numbers(self, names: list[str], behind: int, one: tuple[int, ...]) -> tuple[str, bool] | None:
        """The numbers that an `eq` compares with 0, 1, 2, … along the dimension with `behind` dimensions after it, in
        the shape `one`; None if it compares others.
        """
        w = self.writer
        for numbers, counted in (names, names[::-1]):
            if self._counts(counted, behind) and self._is_one(numbers, behind):
                wide = (*(1 for _ in one[len(w.shape(numbers)) :]), *w.shape(numbers))
                return w.expand(w.reshape(numbers, wide, "experts"), one, "experts"), True
        return None

    def _counts(self, name: str, behind: int) -> bool:
        """Whether a value is 0, 1, 2, … along the dimension with `behind` dimensions after it."""
        w = self.writer
        shape = w.shape(name)
        if len(shape) < behind or math.prod(shape) != shape[-behind]:
            return False
        op = self.makers.get(name)
        while op is not None and op.name in ("reshape", "to"):
            op = self.makers.get(next(op.refs()))
        return op is not None and op.name == "arange" and sum(isinstance(arg, int) for arg in op.args) == 1

    def _is_one(self, name: str, behind: int) -> bool:
        shape = self.writer.shape(name)
        return len(shape) < behind or shape[-behind] == 1

    def _stacked(self, op: Op, result: Value, operands: Sequence[Lifted]) -> Lifted:
        """An operation on the values of all experts."""
        w = self.writer
        shape = (self.count, *result.type.shape)
        names = [each.name for each in operands]
        source = operands[0]
        args: tuple[Arg, ...]
        if op.name == "reshape":
            args = (Ref(source.name), shape)
        elif op.name == "permute" and isinstance(op.args[1], tuple):
            args = (Ref(source.name), (0, *(dim + 1 for dim in op.args[1] if isinstance(dim, int))))
        elif op.name == "slice":
            _, dim, *numbers = op.args
            assert isinstance(dim, int)
            args = (Ref(source.name), dim + 1, *numbers)
        elif op.name in ("any", "sum") and len(op.args) > 1:
            return self._over_choices(op, result, source)
        elif is_elementwise(op.name) or op.name == "detach":
            rank = len(result.type.shape)
            names = [
                w.reshape(each.name, (self.count, *(1 for _ in range(rank + 1 - len(w.shape(each.name)))),
                                      *w.shape(each.name)[1:]), f"{each.name}_wide")
                if each.kind == "stacked" else each.name
                for each in operands
            ]  # fmt: skip
            lifted = op.reading(names)
            return self._with_witness(op, result, lifted.args, lifted.attrs, shape, operands)
        else:
            raise NotEqualError
        return self._with_witness(op, result, args, op.attrs, shape, operands)

    def _with_witness(
        self, op: Op, result: Value, args: tuple[Arg, ...], attrs: tuple[tuple[str, Arg], ...],
        shape: tuple[int, ...], operands: Sequence[Lifted],
    ) -> Lifted:  # fmt: skip
        w = self.writer
        made = w.add(op.name, args, shape, result.type.dtype, f"{result.name}_stacked", **dict(attrs))
        held = [self.witnesses[each.name] for each in operands if each.name in self.witnesses]
        if not held:
            return Lifted("stacked", made)
        witness = held[0]
        if op.name == "reshape":
            witness = replace(witness, name=w.reshape(witness.name, (*shape[1:], *witness.slots), "experts"))
        elif op.name == "permute" and isinstance(op.args[1], tuple):
            order = [dim for dim in op.args[1] if isinstance(dim, int)]
            slots = range(len(order), len(order) + len(witness.slots))
            witness = replace(witness, name=w.permute(witness.name, (*order, *slots), "experts"))
        elif op.name in _BOTH and w.shape(witness.name) == (*shape[1:], *witness.slots):
            witness = replace(witness, exact=False)
        elif not (op.name in ("to", "detach") or (op.name in _TRUE and op.args[1] == 0)):
            return Lifted("stacked", made)
        self.witnesses[made] = witness
        return Lifted("stacked", made)

    def _over_choices(self, op: Op, result: Value, source: Lifted) -> Lifted:
        """`any` or `sum` of masks along a dimension of choices; the choices become slots."""
        w = self.writer
        dims = op.args[1] if isinstance(op.args[1], tuple) else (op.args[1],)
        keep = bool(argument(op, 2, "keepdim", False))
        rank = len(w.shape(source.name)) - 1
        over = [dim % rank for dim in dims if isinstance(dim, int)]
        lifted: Arg = tuple(dim + 1 for dim in over) if isinstance(op.args[1], tuple) else over[0] + 1
        shape = (self.count, *result.type.shape)
        dtype, stem = result.type.dtype, f"{result.name}_stacked"
        made = w.add(op.name, (Ref(source.name), lifted, keep), shape, dtype, stem, **dict(op.attrs))
        witness = self.witnesses.get(source.name)
        known = witness is not None and witness.exact and not witness.slots and len(over) == 1 and not keep
        if witness is not None and known and self._distinct().numbers(witness.name, over[0]):
            order = [dim for dim in range(rank) if dim != over[0]]
            numbers = w.permute(witness.name, (*order, over[0]), "experts")
            self.witnesses[made] = _Witness(numbers, (w.shape(witness.name)[over[0]],))
        return Lifted("stacked", made)

    # -- rows --------------------------------------------------------------------------------------------

    def _of_rows(self, stacked: str, places: Sequence[int], dims: Sequence[int]) -> str:
        """For every row, the element of its own expert; `places` of the stacked value run along `dims` of the mask."""
        w = self.writer
        shape = w.shape(stacked)[1:]
        if len(places) < len(shape):
            raise NotEqualError
        last = w.permute(stacked, (*range(1, len(shape) + 1), 0), f"{stacked}_by_row")
        rows = self._spread_rows(last, places, dims)
        count = w.shape(rows)[0]
        column = w.reshape(self.experts, (count, 1), "experts_column")
        dtype = w.types[stacked].dtype
        if dtype == "bool":  # gathers may not support bools
            rows = w.add("to", (Ref(rows), DTypeArg("i64")), w.shape(rows), "i64", f"{rows}_number")
            dtype = "i64"
        own = w.add("gather", (Ref(rows), 1, Ref(column)), (count, 1), dtype, f"{stacked}_own")
        return w.reshape(own, (count,), f"{stacked}_own")

    def _spread_rows(self, x: str, places: Sequence[int], dims: Sequence[int]) -> str:
        position = {dim: place for place, dim in enumerate(self.order)}
        whole = [self.whole[dim] for dim in self.order]
        made = self.writer.rows(x, list(places), [position[dim] for dim in dims], whole, f"{x}_rows")
        if made is None:
            raise NotEqualError
        return made[0]

    def _read(self, op: Op, result: Value, operands: Sequence[Lifted]) -> Lifted:
        """Rows of a tensor at the selected places."""
        x, *given = operands
        if op.name != "index" or not isinstance(op.args[1], tuple) or x.kind == "rows":
            raise NotEqualError
        if any(each.kind != "selected" for each in given):
            raise NotEqualError
        places = [place for place, name in enumerate(names_of(op.args[1])) if name is not None]
        dims = [each.dim for each in given]
        if x.kind == "stacked":
            w = self.writer
            own = self._of_rows(x.name, places, dims)
            if w.types[own].dtype != result.type.dtype:
                own = w.add("to", (Ref(own), DTypeArg(result.type.dtype)), w.shape(own), result.type.dtype, own)
            return Lifted("rows", own)
        rows = self._spread_rows(x.name, places, dims)
        if self.chosen and not result.type.differentiable:  # other rows may hold places beyond a table
            rows = self.writer.only(rows, places[0], self.chosen, f"{rows}_kept")
        return Lifted("rows", rows, places[0])

    def _rows(self, op: Op, result: Value, operands: Sequence[Lifted]) -> Lifted:
        w = self.writer
        if op.name in ("linear", "matmul") and [each.kind for each in operands] == ["rows", "stacked"]:
            return self._product(op, result, operands[0], operands[1])
        names = [each.name for each in operands]
        held: list[int | None] = [each.dim if each.kind == "rows" else None for each in operands]
        dim = next(each.dim for each in operands if each.kind == "rows")
        for place, each in enumerate(operands):
            if each.kind == "selected":
                raise NotEqualError
            if each.kind == "stacked":
                if not is_elementwise(op.name):
                    raise NotEqualError
                names[place] = self._own_weights(each.name, dim, len(result.type.shape))
                held[place] = dim
        rows = dims_of_rows(op, w.types, [each.dim if each.kind == "rows" else None for each in operands])
        if rows is None:
            raise NotEqualError
        count = math.prod(self.whole)
        lifted = op.reading(names)
        if op.name in ("reshape", "expand") and isinstance(op.args[1], tuple):
            sizes = tuple(count if place == rows[0] else size for place, size in enumerate(op.args[1]))
            lifted = replace(lifted, args=(lifted.args[0], sizes))
        values = tuple(self._with_count(value, place, count) for value, place in zip(op.results, rows, strict=True))
        lifted = replace(lifted, results=values)
        dims = dims_of_rows(lifted, w.types, held)
        if dims is None:
            raise NotEqualError
        w.keep(lifted)
        made = [Lifted("rows", value.name, each) for value, each in zip(values, dims, strict=True)]
        return made[op.results.index(result)]

    def _with_count(self, value: Value, dim: int, count: int) -> Value:
        """A result with `count` rows; a token may have a row for each of its slots."""
        shape = tuple(count if place == dim else size for place, size in enumerate(value.type.shape))
        name = unique(f"{value.name}_of_experts", self.writer.taken)
        return Value(name=name, type=TensorType.replicated(value.type.dtype, shape))

    def _own_weights(self, stacked: str, dim: int, rank: int) -> str:
        """For every row, the values of its own expert, such as a bias, in the shape of an operand of rank `rank`."""
        w = self.writer
        shape = w.shape(stacked)[1:]
        wide = (*(1 for _ in range(rank - len(shape))), *shape)
        if wide[dim] != 1:
            raise NotEqualError
        rows = w.shape(self.experts)[0]
        own = w.add(
            "index", (Ref(stacked), (Ref(self.experts),)), (rows, *shape), w.types[stacked].dtype, f"{stacked}_own"
        )
        flat = w.reshape(own, (rows, *wide[:dim], *wide[dim + 1 :]), f"{stacked}_own")
        return w.permute(flat, (*range(1, dim + 1), 0, *range(dim + 1, rank)), f"{stacked}_own")

    def _product(self, op: Op, result: Value, x: Lifted, weights: Lifted) -> Lifted:
        """The product of every row with the matrix of its expert."""
        w = self.writer
        shape, matrices = w.shape(x.name), w.shape(weights.name)
        rows = shape[x.dim]
        if len(matrices) != 3 or math.prod(shape) != rows * shape[-1] or x.dim == len(shape) - 1:
            raise NotEqualError
        flat = w.reshape(x.name, (rows, shape[-1]), f"{x.name}_rows")
        matrix = weights.name
        if op.name == "linear":
            matrix = w.permute(matrix, (0, 2, 1), f"{matrix}_t")
        width = w.shape(matrix)[2]
        args = (Ref(flat), Ref(self.experts), Ref(matrix))
        made = w.add("expert_matmul", args, (rows, width), result.type.dtype, f"{result.name}_of_experts")
        return Lifted("rows", w.reshape(made, (*shape[:-1], width), f"{made}_placed"), x.dim)


def _form(op: Op) -> tuple[object, ...]:
    """The form of an operation, of random ones without their number."""
    return (replace(op, args=op.args[:-1]) if op.name in RANDOM else op).form
