"""Lookups in tables that lie whole on one rank each: ids travel to the ranks of their tables, and vectors back.

    x = embedding(tables.0.weight, ids_0)  # f32[16@dp, 8]
    y = embedding(tables.1.weight, ids_1)  # f32[16@dp, 8]
  ->
    ids     = cat((ids_0, ids_1), 1)            # i64[16@dp, 2]   a column for each slot of each rank
    ranked  = permute(reshape(ids, …), …)       # i64[2, 16@dp, 1]
    wanted  = reshape(ranked, (32,))            # i64[2@dp · 16]  partition inserts the all-to-all
    found   = embedding(tables.*.weight, wanted, groups=2)  # f32[2@dp · 16, 8]
    x, y    = split(reshape(permute(found, …), …), (8, 8), 1)

The tables of a stack are rows of one parameter, whose parts on the ranks have equal length: rows of zeros fill up the
part of a rank with fewer rows. A rank with fewer tables looks up the last of these rows in its spare slots. Bags are
reduced on the rank of their table.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from partc.ir.layout import Layout, Shard, Sizes, SubDim
from partc.ir.naming import unique
from partc.ir.program import Arg, Op, Ref, TensorType, Value
from partc.passes.tables.lookups import Lookup
from partc.passes.tables.writing import Writing
from partc.sharding.choices import axis_order

_REDUCING = frozenset({"sum", "amax"})
_MOVED = frozenset({"to", "mul", "masked_fill"}) | _REDUCING  # operations on vectors that run on the ranks of tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader(Lookup):
    """The lookup of a table in a region, with the operations that follow it on the table's rank."""

    table: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStack:
    """Tables with equal lookups: the slots on each rank, and the parameter of the region that holds them."""

    param: Value
    # For each rank its tables, with the first row of each in the rank's part.
    ranks: tuple[tuple[tuple[Reader, int], ...], ...]

    @property
    def slots(self) -> int:
        return max(map(len, self.ranks))

    @property
    def one(self) -> Reader:
        return next(reader for some in self.ranks for reader, _ in some)


def shape_key(reader: Reader, types: Mapping[str, TensorType]) -> Hashable:
    """A key that is equal for lookups with equal shapes and equal operations up to the reduction of bags."""
    table, ids = types[reader.table], types[reader.ids]
    steps = [
        (op.name, position, op.attrs, op.result.type.dtype, *(_form(arg, types) for arg in op.args))
        for op, position in reader.after
    ]
    vectors = reader.last.result.type
    return table.dtype, table.layout.dims[1:], ids.dtype, ids.shape, vectors.shape, vectors.dtype, *steps


def _form(arg: Arg, types: Mapping[str, TensorType]) -> Hashable:
    return (types[arg.name].dtype, types[arg.name].shape) if isinstance(arg, Ref) else repr(arg)


@dataclass(kw_only=True)
class Exchange(Writing):
    """The exchange of several stacks, over axes that cut the batch first."""

    stacks: Sequence[TableStack]
    over: tuple[str, ...]

    def made(self) -> tuple[Op, ...]:
        wanted = self._to_tables([(stack, self._columns(stack)) for stack in self.stacks], "tables_ids")
        found = [self._looked_up(stack, ids) for stack, ids in zip(self.stacks, wanted, strict=True)]
        by_type: dict[str, list[tuple[TableStack, Ref]]] = {}
        for stack, vectors in zip(self.stacks, found, strict=True):
            by_type.setdefault(self.types[vectors.name].dtype, []).append((stack, vectors))
        for some in by_type.values():
            self._return_vectors(some)
        return tuple(self.ops)

    @property
    def _group_size(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.over)

    @property
    def _batch(self) -> int:
        return self.types[[*self.stacks[0].one.op.refs()][1]].shape[0]

    @property
    def _home(self) -> SubDim:
        """The batch dimension as the axes cut it."""
        return self.types[[*self.stacks[0].one.op.refs()][1]].layout.normalized(self.sizes).dims[0][0]

    def _at_tables(self, shape: Sequence[int]) -> Layout:
        """The layout of [ranks, batch, …]: the whole batch, on the ranks of tables."""
        ways, time = self._group_size, tuple(axis for axis in self._home.axes if axis not in self.over)
        batch = (SubDim(ways), SubDim(shape[1] // ways, time))
        return Layout(((SubDim(ways, self.over),), batch, *((SubDim(size),) for size in shape[2:]))).normalized(
            self.sizes
        )

    def _at_home(self, shape: Sequence[int]) -> Layout:
        return Layout(((SubDim(shape[0]),), (self._home,), *((SubDim(size),) for size in shape[2:])))

    def _columns(self, stack: TableStack) -> list[Ref]:
        """For every slot of every rank, the row numbers to look up: [batch, ids]."""
        found = []
        each = math.prod(self.types[[*stack.one.op.refs()][1]].shape[1:])
        rows = stack.param.type.shape[0] // self._group_size
        for tables in stack.ranks:
            for slot in range(stack.slots):
                reader, first = tables[slot] if slot < len(tables) else (stack.one, rows - 1)
                ids = Ref(reader.ids)
                type, name = self.types[ids.name], reader.op.result.name
                shape = (self._batch, each)
                flat = (
                    ids
                    if type.shape == shape
                    else self.plain("reshape", (ids, shape), f"{name}_ids", shape, type.dtype)
                )
                if slot >= len(tables):
                    flat = self.plain("mul", (flat, 0), f"{name}_none", shape, type.dtype)
                if first:
                    flat = self.plain("add", (flat, first), f"{name}_numbers", shape, type.dtype)
                found.append(flat)
        return found

    def _to_tables(self, columns: Sequence[tuple[TableStack, Sequence[Ref]]], made: str) -> list[Ref]:
        """Move columns for every slot to the ranks of tables: for each stack [ranks, batch, slots · columns].

        All columns must have the same type.
        """
        ways, batch = self._group_size, self._batch
        dtype = self.types[columns[0][1][0].name].dtype
        widths = [self.types[some[0].name].shape[1] * stack.slots for stack, some in columns]
        ordered = [
            each
            for rank in range(ways)
            for stack, some in columns
            for each in some[rank * stack.slots : (rank + 1) * stack.slots]
        ]
        total = sum(widths)
        shape = (batch, ways * total)
        joined = ordered[0] if len(ordered) == 1 else self.plain("cat", (tuple(ordered), 1), made, shape, dtype)
        by_rank = self.plain("reshape", (joined, (batch, ways, total)), f"{made}_ranks", (batch, ways, total), dtype)
        ranked = self.plain("permute", (by_rank, (1, 0, 2)), f"{made}_ranked", (ways, batch, total), dtype)
        there = self._at_tables((ways, batch, total))
        if len(columns) == 1:
            return [self.plain("alias", (ranked,), f"{made}_there", (ways, batch, total), dtype, read=there)]
        names = [unique(f"{made}_there", self.taken) for _ in columns]
        shapes = [(ways, batch, width) for width in widths]
        return list(self.several("split", (ranked, tuple(widths), 2), names, shapes, dtype, read=there))

    def _looked_up(self, stack: TableStack, ids: Ref) -> Ref:
        """The vectors of a stack, reduced if they are bags: [ranks, batch, slots · columns]."""
        one, types = stack.one, self.types
        ways, batch, _ = types[ids.name].shape
        tail, name = types[one.ids].shape[1:], stack.param.name
        count, width = math.prod(types[ids.name].shape), stack.param.type.shape[1]
        wanted = self.plain("reshape", (ids, (count,)), f"{name}_wanted", (count,), types[ids.name].dtype)
        dtype = one.op.result.type.dtype
        x = self.plain(
            "embedding", (Ref(name), wanted), f"{name}_found", (count, width), dtype, attrs=(("groups", ways),)
        )
        shape: tuple[int, ...] = (ways, batch, stack.slots, *tail, width)
        x = self.plain("reshape", (x, shape), f"{name}_vectors", shape, dtype)
        for index, (op, position) in enumerate(one.after):
            x = self._reduced(stack, index, op, position, x)
            shape, dtype = types[x.name].shape, types[x.name].dtype
        flat = (ways, batch, math.prod(shape[2:]))
        return x if shape == flat else self.plain("reshape", (x, flat), f"{name}_flat", flat, dtype)

    def _reduced(self, stack: TableStack, index: int, op: Op, position: int, x: Ref) -> Ref:
        """The vectors after an operation on bags; its other operands travel like ids."""
        others: dict[str, Ref] = {}
        for ref in op.refs():
            if ref != [*op.refs()][position]:
                others[ref] = self._operand(stack, index, ref)
        ways, batch = self._group_size, self._batch
        own = op.result.type
        shape = (ways, batch, stack.slots, *own.shape[1:])
        args = list(
            op.renamed({[*op.refs()][position]: x.name, **{name: ref.name for name, ref in others.items()}}).args
        )
        if op.name in _REDUCING:  # dimensions after the batch come after the slots
            args[1] = tuple(dim + 2 for dim in _dims(op, len(self.types[[*op.refs()][position]].shape)))
        return self.plain(
            op.name, tuple(args), f"{stack.param.name}_{op.name}", shape, own.dtype, attrs=op.attrs, keep=x
        )

    def _operand(self, stack: TableStack, index: int, name: str) -> Ref:
        """The operand of every slot's operation: [ranks, batch, slots, …]."""
        place = [*stack.one.after[index][0].refs()].index(name)
        shape = self.types[name].shape
        each = (self._batch, math.prod(shape[1:]))
        columns = []
        for tables in stack.ranks:
            for slot in range(stack.slots):
                reader = tables[slot][0] if slot < len(tables) else stack.one
                own = Ref([*reader.after[index][0].refs()][place])
                dtype = self.types[own.name].dtype
                columns.append(
                    own if shape == each else self.plain("reshape", (own, each), f"{own.name}_flat", each, dtype)
                )
        (there,) = self._to_tables([(stack, columns)], f"{stack.param.name}_{name}")
        whole = (self._group_size, self._batch, stack.slots, *shape[1:])
        return self.plain("reshape", (there, whole), f"{name}_slots", whole, self.types[there.name].dtype)

    def _return_vectors(self, found: Sequence[tuple[TableStack, Ref]]) -> None:
        """Return the vectors of every table to the ranks of the batch."""
        ways, batch = self._group_size, self._batch
        dtype = self.types[found[0][1].name].dtype
        widths = [self.types[ref.name].shape[2] for _, ref in found]
        total, name = sum(widths), "tables_vectors"
        shape = (ways, batch, total)
        parts = tuple(ref for _, ref in found)
        joined = parts[0] if len(parts) == 1 else self.plain("cat", (parts, 2), name, shape, dtype)
        transposed = (batch, ways, total)
        home = self.plain("permute", (joined, (1, 0, 2)), f"{name}_home", transposed, dtype, read=self._at_home(shape))
        flat = self.plain("reshape", (home, (batch, ways * total)), f"{name}_flat", (batch, ways * total), dtype)
        pieces: list[tuple[str, int, Reader | None]] = []
        for rank in range(ways):
            for (stack, _), width in zip(found, widths, strict=True):
                for slot in range(stack.slots):
                    here = stack.ranks[rank]
                    reader = here[slot][0] if slot < len(here) else None
                    own = None if reader is None else reader.last.result
                    if own is not None and own.type.shape == (batch, width // stack.slots):
                        label, reader = own.name, None
                    else:
                        label = unique("unread" if own is None else f"{own.name}_row", self.taken)
                    pieces.append((label, width // stack.slots, reader))
        shapes = [(batch, size) for _, size, _ in pieces]
        names = [each for each, _, _ in pieces]
        made = self.several("split", (flat, tuple(size for _, size, _ in pieces), 1), names, shapes, dtype)
        for ref, (_, _, reader) in zip(made, pieces, strict=True):
            if reader is not None:
                own = reader.last.result
                self.plain("reshape", (ref, own.type.shape), own.name, own.type.shape, dtype, new=False)


def in_one_piece(ops: Sequence[Op], writing: Writing) -> tuple[Op, ...]:
    """The operations, with a view in place of a concatenation of all tables' vectors in order."""
    makers = {value.name: op for op in ops for value in op.results}
    found: list[Op] = []
    for op in ops:
        parts = [makers.get(name) for name in op.refs()] if op.name == "cat" else []
        views = [each for each in parts if each is not None and each.name == "reshape"]
        split = makers.get(next(views[0].refs())) if views else None
        if split is not None and split.name == "split" and len(views) == len(parts):
            whole, _, dim = split.args
            assert isinstance(whole, Ref) and isinstance(dim, int)
            place = op.args[1] if len(op.args) > 1 else 0
            before = math.prod(writing.types[whole.name].shape[:dim])
            own = op.result.type
            if [next(each.refs()) for each in views] == [value.name for value in split.results] and (
                isinstance(place, int) and place >= 0 and math.prod(own.shape[:place]) == before
            ):
                writing.ops = []
                writing.plain("reshape", (whole, own.shape), op.result.name, own.shape, own.dtype, new=False)
                if writing.types[op.result.name] == own:
                    found.extend(replace(each, source=op.source) for each in writing.ops)
                    continue
                writing.types[op.result.name] = own
        found.append(op)
    return tuple(found)


def stacked_type(table: TensorType, rows: int, over: tuple[str, ...], sizes: Sizes) -> TensorType:
    """The type of a stack with `rows` rows on each rank."""
    where = table.layout.placements(axis_order(sizes)) | dict.fromkeys(over, Shard(0))
    ways = math.prod(sizes[axis] for axis in over)
    layout = Layout.build((ways * rows, *table.shape[1:]), where, sizes)
    assert layout is not None  # the rows are a multiple of the axes
    return replace(table, layout=layout)


def rank_local_reader(
    table: str, op: Op, after: Sequence[tuple[Op, int]], types: Mapping[str, TensorType]
) -> Reader | None:
    """The lookup with the operations on its vectors that can run on the table's rank; None if its ids cannot travel."""
    ids = types[Lookup(op).ids].layout
    if any(sub.axes for dim in ids.dims[1:] for sub in dim) or any(sub.axes for sub in types[table].layout.dims[0]):
        return None
    if len(op.args) > 2 and not any(each.name == "masked_fill" for each, _ in after):
        return None  # a row without a gradient
    steps: list[tuple[Op, int]] = []
    for each, position in after:
        refs = [*each.refs()]
        rank = len(types[refs[position]].shape)
        others = [types[name] for index, name in enumerate(refs) if index != position]
        alike = all(
            len(type.shape) == rank and type.layout.dims[0] == ids.dims[0] and not _cut_behind(type) for type in others
        )
        if each.name not in _MOVED or not alike or (each.name in _REDUCING and 0 in _dims(each, rank)):
            cast = steps[:1] if steps and steps[0][0].name == "to" else []
            return Reader(table=table, op=op, after=tuple(cast))
        steps.append((each, position))
    return Reader(table=table, op=op, after=tuple(steps))


def _cut_behind(type: TensorType) -> bool:
    return any(sub.axes for dim in type.layout.dims[1:] for sub in dim)


def _dims(op: Op, rank: int) -> tuple[int, ...]:
    dims = op.args[1] if isinstance(op.args[1], tuple) else (op.args[1],)
    return tuple(dim % rank for dim in dims if isinstance(dim, int))


def stack_name(names: Sequence[str], taken: Collection[str]) -> str:
    """The names with `*` for the part that differs, as `tables.*.weight`; for one name, `*` is its last part."""
    split = [name.split(".") for name in names]
    if len(names) == 1 and len(split[0]) > 1:
        parts = [*split[0][:-1], "*"]
    elif len({len(parts) for parts in split}) == 1 and len(names) > 1:
        parts = [each[0] if len({*each}) == 1 else "*" for each in zip(*split, strict=True)]
    else:
        parts = ["tables", "*"]
    return unique(".".join(parts), {*taken})
