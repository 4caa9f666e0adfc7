"""Indexing by numbers of rows, in operations that treat rows alike.

    rows  = reshape(arange(8), (8, 1))
    index = index(x, (rows, j))             ->  gather(x, 1, j)
    put   = index_put(x, (rows, j), y)      ->  scatter(x, 1, j, y)

The indices of the leading dimensions select every row in order: each is an arange along its own dimension, or absent in
a write. The other indices select elements along the next dimensions, which are joined into one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from partc import fuel
from partc.ir.naming import unique
from partc.ir.program import Arg, DType, DTypeArg, Op, Ref, Region, TensorType, Value
from partc.rules.rule import argument

_Counting = Mapping[str, tuple[int, int]]  # values that are 0, 1, … along one dimension: their count, the dimension


def plain_indexing(region: Region) -> Region:
    """Replace x[arange(n)[:, None], arange(m)[None, :]] by x, up to dimensions of size 1; other reads and writes at
    the numbers of rows become gathers and scatters.
    """
    types = region.types(region.forward)
    taken = {*types}
    counting: dict[str, tuple[int, int]] = {}
    ops: list[Op] = []
    for op in region.forward.ops:
        first = op.args[0] if op.args else None
        found: list[Op] = []
        match op.name:
            case "arange" if len(op.args) == 1 and isinstance(first, int):
                counting[op.result.name] = first, 0
            case "add" if isinstance(first, Ref) and first.name in counting and op.args[1] == 0:
                counting[op.result.name] = counting[first.name]
            case "reshape" if isinstance(first, Ref) and first.name in counting:
                (count, _), shape = counting[first.name], op.result.type.shape
                if count == math.prod(types[first.name].shape) and count in shape:
                    counting[op.result.name] = count, shape.index(count)
            case "expand" if isinstance(first, Ref) and first.name in counting:
                (count, dim), more = counting[first.name], len(op.result.type.shape) - len(types[first.name].shape)
                counting[op.result.name] = count, dim + more
            case "index" | "index_put" if isinstance(first, Ref):
                found = _plain(op, types, counting, taken)
                found = found if found and fuel.may_rewrite("plain indexing", op.source) else []
        ops.extend(found or [op])
    return replace(region, forward=replace(region.forward, ops=tuple(ops)))


def _plain(op: Op, types: Mapping[str, TensorType], counting: _Counting, taken: set[str]) -> list[Op]:
    """The operations in place of an indexing; none if rows do not keep their numbers."""
    x, indices = op.args[:2]
    if not isinstance(x, Ref) or not isinstance(indices, tuple):
        return []
    shape = types[x.name].shape
    if op.name == "index" and (shaped := _as_reshape(op, shape, types, counting)) is not None:
        return [shaped]
    places = _places(op.name == "index", indices, shape, types, counting)
    if places is None or 0 in (*shape, *op.result.type.shape):
        return []
    w = _IndexingWriter(op, {name: types[name] for name in op.refs()}, taken)
    index = places.joined(w)
    count = math.prod(places.extra)
    wide = (*shape[: places.rows], count, *shape[places.end :])
    index = w.expand(w.reshape(index, (*w.shape(index), *(1 for _ in shape[places.end :]))), wide)
    flat = w.reshape(x, (*shape[: places.rows], math.prod(shape[places.rows : places.end]), *shape[places.end :]))
    if op.name == "index":
        w.reshape(w.add("gather", (flat, places.rows, index), wide, op.result.type.dtype), op.result.type.shape, True)
        return w.ops
    y = op.args[2]
    if not isinstance(y, Ref):
        return []
    values = w.reshape(w.expand(y, (*shape[: places.rows], *places.extra, *shape[places.end :])), wide)
    name = "scatter_add" if argument(op, 3, "accumulate", False) else "scatter"
    made = w.add(name, (flat, places.rows, index, values), w.shape(flat), op.result.type.dtype)
    w.reshape(made, shape, True)
    return w.ops


def _as_reshape(op: Op, shape: tuple[int, ...], types: Mapping[str, TensorType], counting: _Counting) -> Op | None:
    """An indexing as a reshape, if every index counts through its whole dimension in order; else None."""
    indices = op.args[1]
    if not isinstance(indices, tuple) or len(indices) != len(shape):
        return None
    rank, places = len(op.result.type.shape), []
    for size, index in zip(shape, indices, strict=True):
        count, dim = counting.get(index.name, (None, 0)) if isinstance(index, Ref) else (None, 0)
        if count != size or not isinstance(index, Ref):
            return None
        places += [dim + rank - len(types[index.name].shape)] if size != 1 else []
    if places != sorted({*places}) or math.prod(op.result.type.shape) != math.prod(shape):
        return None
    return replace(op, name="reshape", args=(op.args[0], op.result.type.shape), attrs=())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Numbers along the dimensions from `rows` to `end`, for each row of those before."""

    rows: int
    end: int
    numbers: tuple[Ref, ...]
    sizes: tuple[int, ...]
    lead: tuple[int, ...]  # the sizes of the leading dimensions; 1 where all rows have the same numbers
    extra: tuple[int, ...]  # the shape of each row's numbers

    def joined(self, w: _IndexingWriter) -> Ref:
        """The numbers in the flattened dimensions, as [*lead, count]; indexing accepts negative ones, a gather not."""
        found: Ref | None = None
        for number, size in zip(self.numbers, self.sizes, strict=True):
            number = w.add("remainder", (w.long(number), size), w.shape(number))
            if found is not None:
                found = w.add("mul", (found, size), w.shape(found))
                number = w.add("add", (found, number), torch.broadcast_shapes(w.shape(found), w.shape(number)))
            found = number
        assert found is not None
        own = self.lead if set(self.lead) != {1} else ()
        wide = w.expand(found, (*own, *self.extra))
        return w.reshape(wide, (*self.lead, math.prod(self.extra)))


def _places(
    read: bool, indices: tuple[Arg, ...], shape: tuple[int, ...], types: Mapping[str, TensorType], counting: _Counting
) -> _Places | None:
    """The places that an indexing reads or writes in each row; None if it does not go by rows.

    A read without an index of rows stays an `index`, for which the rule table has a rule.
    """
    while indices and indices[-1] is None:
        indices = indices[:-1]
    free = next((at for at, index in enumerate(indices) if index is not None), len(indices))
    given = [index for index in indices[free:] if isinstance(index, Ref) and types[index.name].dtype in ("i64", "i32")]
    if len(given) != len(indices) - free or not given or (free and read):
        return None
    whole = tuple(torch.broadcast_shapes(*(types[index.name].shape for index in given)))
    if free:
        rows, numbers, lead, extra = free, given, tuple(1 for _ in range(free)), whole
    else:
        rows = 0
        while rows < len(given) - 1 and rows < len(whole) and whole[rows] == shape[rows] > 1:
            count, dim = counting.get(given[rows].name, (0, 0))
            if count != shape[rows] or dim + len(whole) - len(types[given[rows].name].shape) != rows:
                break
            rows += 1
        numbers, lead, extra = given[rows:], whole[:rows], whole[rows:]
    if not rows:
        return None
    end = rows + len(numbers)
    return _Places(rows=rows, end=end, numbers=tuple(numbers), sizes=shape[rows:end], lead=lead, extra=extra)


@dataclass(slots=True)
class _IndexingWriter:
    """Writes the operations that replace one operation."""

    op: Op
    types: dict[str, TensorType]
    taken: set[str]
    ops: list[Op] = field(default_factory=list)

    def shape(self, x: Ref) -> tuple[int, ...]:
        return self.types[x.name].shape

    def add(
        self, name: str, args: tuple[Arg, ...], shape: tuple[int, ...], dtype: DType = "i64", last: bool = False
    ) -> Ref:
        """Write an operation; the `last` one defines the result of the operation that it replaces."""
        made = self.op.result.name
        made = made if last else unique(f"{made}_{name}", self.taken)
        value = Value(name=made, type=TensorType.replicated(dtype, shape))
        self.types[made] = value.type
        self.ops.append(Op(name=name, args=args, results=(value,), source=self.op.source))
        return Ref(made)

    def long(self, x: Ref) -> Ref:
        return x if self.types[x.name].dtype == "i64" else self.add("to", (x, DTypeArg("i64")), self.shape(x))

    def reshape(self, x: Ref, shape: tuple[int, ...], last: bool = False) -> Ref:
        if self.shape(x) == shape and not last:
            return x
        return self.add("reshape", (x, shape), shape, self.types[x.name].dtype, last)

    def expand(self, x: Ref, shape: tuple[int, ...]) -> Ref:
        return x if self.shape(x) == shape else self.add("expand", (x, shape), shape, self.types[x.name].dtype)
