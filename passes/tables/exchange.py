"""Lookups in tables that are cut by rows: ids travel to the ranks of their rows, and vectors back.

    vectors = embedding(table, ids)  # f32[16, 8] partial(dp)
  ->
    vectors_rank   = floor_divide(ids, 150)
    vectors_number = remainder(ids, 150)
    order, grouped, own, counts = route(vectors_rank, 2, axis="dp")
    vectors_wanted = dispatch(vectors_number, order, grouped, counts, axis="dp")
    vectors_found  = embedding(table, vectors_wanted, groups=2)
    vectors        = combine(vectors_found, order, grouped, counts, axis="dp")

Rows move as for experts; the rows of a rank are its only expert. The number of ids that a rank receives depends on the
data; layouts have its mean.

Several lookups share an exchange: each table is an expert of every rank. Each rank concatenates the ids of all lookups,
`divide_rows` gives each table the ids received for it, and `join_rows` restores the order of the vectors.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from partc.ir.layout import Layout, Sizes, SubDim
from partc.ir.naming import unique
from partc.ir.program import Arg, DTypeArg, Op, Ref, TensorType, Value
from partc.passes.tables.lookups import columns
from partc.passes.tables.writing import Writing
from partc.rules.inference import inferred
from partc.sharding.choices import axis_order


def exchange_operations(
    lookups: Sequence[Op],
    casts: Mapping[str, Op],
    axis: str,
    types: Mapping[str, TensorType],
    sizes: Sizes,
    taken: set[str],
) -> tuple[Op, ...]:
    """The operations that replace lookups and the casts of their vectors (by the vectors' names).

    `types` has the tables as they are cut, and the ids in their original layout.
    """
    return _Exchange(
        lookups=lookups,
        casts=casts,
        axis=axis,
        types=dict(types),
        sizes=sizes,
        taken=taken,
        source=lookups[0].source,
    ).made()


def exchange_groups(
    lookups: Sequence[Op], casts: Mapping[str, Op], types: Mapping[str, TensorType], sizes: Sizes
) -> tuple[tuple[Op, ...], ...]:
    """Groups of lookups that share an exchange: their vectors have one type, and the same axes cut their ids."""
    found: dict[Hashable, list[Op]] = {}
    for op in lookups:
        table, ids = (types[name] for name in op.refs())
        home, *inner = Layout((tuple(sub for dim in ids.layout.dims for sub in dim),)).normalized(sizes).dims[0]
        alone = bool(inner) or not home.axes
        key = (home.axes, ids.dtype, casts.get(op.result.name, op).result.type.dtype, table.layout.dims[1])
        found.setdefault(op.result.name if alone else key, []).append(op)
    return tuple(map(tuple, found.values()))


@dataclass(kw_only=True)
class _Exchange(Writing):
    lookups: Sequence[Op]
    casts: Mapping[str, Op]
    axis: str

    def made(self) -> tuple[Op, ...]:
        results = [self.casts.get(op.result.name, op).result for op in self.lookups]
        first = results[0]
        name, kind = first.name, first.type.dtype
        ranks, numbers = [], []
        for place, op in enumerate(self.lookups):
            rank, number = self._address(op)
            ranks.append(self._as_expert(rank, place))
            numbers.append(number)
        rank, number = self._joined(ranks, f"{name}_ranks"), self._joined(numbers, f"{name}_numbers")
        home = self.types[rank.name].layout
        here = self._received_layout(home)
        plan = self._plan(rank, home, here)
        wanted = self._movement("dispatch", number, plan, f"{name}_wanted", home, here)
        founds = [
            self._looked_up(op, ids) for op, ids in zip(self.lookups, self._divided(wanted, plan, numbers), strict=True)
        ]
        found = self._exchange_rows(founds, plan, numbers, f"{name}_all")
        there = self.types[found.name].layout
        alone = len(self.lookups) == 1 and len(first.type.shape) == 2
        back = self._movement("combine", found, plan, name if alone else f"{name}_rows", there, home, new=not alone)
        if not alone:
            for result, rows in zip(results, self._split_rows(back, numbers), strict=True):
                shape = result.type.shape
                self.plain("reshape", (rows, shape), result.name, shape, kind, new=False)
        return tuple(self.ops)

    def _address(self, op: Op) -> tuple[Ref, Ref]:
        """The rank of each id's row, and the row's number there."""
        table, ids = (Ref(name) for name in op.refs())
        shape, name, dtype = self.types[ids.name].shape, op.result.name, self.types[ids.name].dtype
        rows, count = self.types[table.name].shape[0] // self._group_size, math.prod(shape)
        flat = ids if len(shape) == 1 else self.plain("reshape", (ids, (count,)), f"{name}_ids", (count,), dtype)
        return (
            self.plain("floor_divide", (flat, rows), f"{name}_rank", (count,), dtype),
            self.plain("remainder", (flat, rows), f"{name}_number", (count,), dtype),
        )

    def _as_expert(self, rank: Ref, place: int) -> Ref:
        """The number of a table among the tables of all ranks."""
        count, type = len(self.lookups), self.types[rank.name]
        if count == 1:
            return rank
        first = self.plain("mul", (rank, count), f"{rank.name}_first", type.shape, type.dtype)
        return self.plain("add", (first, place), f"{rank.name}_table", type.shape, type.dtype) if place else first

    def _joined(self, flat: Sequence[Ref], made: str) -> Ref:
        """The concatenation of several values on each rank."""
        if len(flat) == 1:
            return flat[0]
        dtype, sizes = self.types[flat[0].name].dtype, self._sizes(flat)
        parts = tuple(
            self.plain("reshape", (each, (self._parts, size)), f"{each.name}_part", (self._parts, size), dtype)
            for each, size in zip(flat, sizes, strict=True)
        )
        total = sum(sizes)
        whole = self.plain("cat", (parts, 1), f"{made}_parts", (self._parts, total), dtype)
        return self.plain("reshape", (whole, (self._parts * total,)), made, (self._parts * total,), dtype)

    def _split_rows(self, rows: Ref, flat: Sequence[Ref]) -> Sequence[Ref]:
        """The transpose of `_joined`, for rows."""
        if len(flat) == 1:
            return (rows,)
        type, sizes = self.types[rows.name], self._sizes(flat)
        shape = (self._parts, sum(sizes), type.shape[1])
        parts = self.plain("reshape", (rows, shape), f"{rows.name}_parts", shape, type.dtype)
        shapes = [(self._parts, size, type.shape[1]) for size in sizes]
        names = [f"{op.result.name}_part" for op in self.lookups]
        return self.several("split", (parts, sizes, 1), names, shapes, type.dtype)

    def _divided(self, wanted: Ref, plan: Sequence[Ref], flat: Sequence[Ref]) -> Sequence[Ref]:
        """The ids received for each table."""
        if len(flat) == 1:
            return (wanted,)
        names = [f"{op.result.name}_wanted" for op in self.lookups]
        return self._by_table("divide_rows", (wanted, plan[2], self._sizes(flat)), names)

    def _exchange_rows(self, founds: Sequence[Ref], plan: Sequence[Ref], flat: Sequence[Ref], made: str) -> Ref:
        if len(founds) == 1:
            return founds[0]
        (rows,) = self._by_table("join_rows", (tuple(founds), plan[2], self._sizes(flat)), [made])
        return rows

    def _by_table(self, name: str, args: tuple[Arg, ...], made: Sequence[str]) -> Sequence[Ref]:
        op = Op(name=name, args=args)
        first = self.types[next(op.refs())]
        op = replace(op, results=tuple(Value(name=unique(each, self.taken), type=first) for each in made))
        op = op.laid_out(each.layout for each in inferred(op, self.types, self.sizes) if each is not None)
        self.add(op)
        return [Ref(value.name) for value in op.results]

    def _looked_up(self, op: Op, wanted: Ref) -> Ref:
        table, (count,) = next(op.refs()), self.types[wanted.name].shape
        shape, kind = (count, self.types[table].shape[1]), op.result.type.dtype
        args, attrs = (Ref(table), wanted), (("groups", self._group_size),)
        more = columns(op)
        found = self.plain("embedding", args, f"{op.result.name}_found", shape, kind, attrs=attrs, more=more)
        if (cast := self.casts.get(op.result.name)) is None:
            return found
        dtype = cast.result.type.dtype
        return self.plain("to", (found, DTypeArg(dtype)), f"{cast.result.name}_found", shape, dtype)

    @property
    def _group_size(self) -> int:
        return self.sizes[self.axis]

    @property
    def _parts(self) -> int:
        """The number of parts into which the ids of one lookup are cut."""
        ids = self.types[[*self.lookups[0].refs()][1]].layout
        return math.prod(self.sizes[axis] for axis in ids.sharded_axes)

    def _sizes(self, flat: Sequence[Ref]) -> tuple[int, ...]:
        return tuple(math.prod(self.types[each.name].shape) // self._parts for each in flat)

    def _received_layout(self, home: Layout) -> Layout:
        """The layout of received ids: the rank of their rows is the major part."""
        others = tuple(axis for axis in axis_order(self.sizes) if axis != self.axis and axis in home.sharded_axes)
        (size,) = home.shape
        return Layout(((SubDim(self._group_size, (self.axis,)), SubDim(size // self._group_size, others)),)).normalized(
            self.sizes
        )

    def _plan(self, rank: Ref, home: Layout, here: Layout) -> tuple[Ref, Ref, Ref]:
        every = math.prod(self.sizes[axis] for axis in home.sharded_axes)
        experts = self._group_size * len(self.lookups)
        counts = Layout(((SubDim(2 * every, home.sharded_axes),), (SubDim(experts),)))
        results = tuple(
            Value(name=unique(word, self.taken), type=TensorType(dtype="i64", layout=layout))
            for word, layout in {"order": home, "grouped": here, "own": here, "counts": counts}.items()
        )
        self.add(Op(name="route", args=(rank, experts, False, 0.0), attrs=(("axis", self.axis),), results=results))
        order, grouped, _, numbers = (Ref(value.name) for value in results)
        return order, grouped, numbers

    def _movement(
        self,
        name: str,
        moved: Ref,
        plan: Sequence[Ref],
        made: str,
        source: Layout,
        target: Layout,
        *,
        new: bool = True,
    ) -> Ref:
        type = replace(self.types[moved.name], layout=replace(source, dims=(target.dims[0], *source.dims[1:])))
        value = Value(name=unique(made, self.taken) if new else made, type=type)
        self.add(Op(name=name, args=(moved, *plan), attrs=(("axis", self.axis),), results=(value,)))
        return Ref(value.name)
