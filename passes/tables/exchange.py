"""A lookup in a table that is cut by rows: ids travel to the ranks of their rows, and vectors back.

    vectors = embedding(table, ids)  # f32[16, 8] partial(dp)
  ->
    vectors_rank   = floor_divide(ids, 150)
    vectors_number = remainder(ids, 150)
    order, grouped, own, counts = route(vectors_rank, 2, axis="dp")
    vectors_wanted = dispatch(vectors_number, order, grouped, counts, axis="dp")
    vectors_found  = embedding(table, vectors_wanted, groups=2)
    vectors        = combine(vectors_found, order, grouped, counts, axis="dp")

The movements are those of experts: a rank's rows are its only expert. The number of ids that come to a rank is the
data's, of which layouts have the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partc.errors import InternalError
from partc.ir.layout import Layout, Shard, Sizes, SubDim
from partc.ir.naming import unique
from partc.ir.program import Arg, Choice, DType, Op, Ref, TensorType, Value
from partc.rules import OpRule, resolve
from partc.rules.rule import Dims
from partc.sharding.choices import axis_order, layouts


def exchanged(op: Op, axis: str, types: Mapping[str, TensorType], sizes: Sizes, taken: set[str]) -> tuple[Op, ...]:
    """The operations in place of a lookup; `types` has the table as it is cut, and the ids as ranks have them."""
    return _Exchange(op, axis, dict(types), sizes, taken).made()


@dataclass
class _Exchange:
    op: Op
    axis: str
    types: dict[str, TensorType]
    sizes: Sizes
    taken: set[str]
    ops: list[Op] = field(default_factory=list)

    def made(self) -> tuple[Op, ...]:
        table, ids = (arg for arg in self.op.args[:2] if isinstance(arg, Ref))
        ways, shape = self.sizes[self.axis], self.types[ids.name].shape
        count, name, dtype = math.prod(shape), self.op.result.name, self.types[ids.name].dtype
        width, kind = self.types[table.name].shape[1], self.op.result.type.dtype
        rows = self.types[table.name].shape[0] // ways
        flat = ids if len(shape) == 1 else self._plain("reshape", (ids, (count,)), f"{name}_ids", (count,), dtype)
        rank = self._plain("floor_divide", (flat, rows), f"{name}_rank", (count,), dtype)
        number = self._plain("remainder", (flat, rows), f"{name}_number", (count,), dtype)
        home = self.types[rank.name].layout
        here = self._among(home)
        plan = self._plan(rank, home, here)
        wanted = self._movement("dispatch", number, plan, f"{name}_wanted", home, here, dtype)
        found = self._plain(
            "embedding", (table, wanted), f"{name}_found", (count, width), kind, attrs=(("groups", ways),)
        )
        there = self.types[found.name].layout
        alone = len(shape) == 1
        back = self._movement(
            "combine", found, plan, name if alone else f"{name}_rows", there, home, kind, new=not alone
        )
        if not alone:
            self._plain("reshape", (back, self.op.result.type.shape), name, self.op.result.type.shape, kind, new=False)
        return tuple(self.ops)

    def _among(self, home: Layout) -> Layout:
        """The layout of the ids that come to the ranks: the rank of their rows is the major part."""
        others = tuple(axis for axis in axis_order(self.sizes) if axis != self.axis and axis in home.sharded_axes)
        (size,) = home.shape
        ways = self.sizes[self.axis]
        return Layout(((SubDim(ways, (self.axis,)), SubDim(size // ways, others)),)).normalized(self.sizes)

    def _plan(self, rank: Ref, home: Layout, here: Layout) -> tuple[Ref, Ref, Ref]:
        every = math.prod(self.sizes[axis] for axis in home.sharded_axes)
        ways = self.sizes[self.axis]
        counts = Layout(((SubDim(2 * every, home.sharded_axes),), (SubDim(ways),)))
        results = tuple(
            Value(name=unique(word, self.taken), type=TensorType(dtype="i64", layout=layout))
            for word, layout in {"order": home, "grouped": here, "own": here, "counts": counts}.items()
        )
        self._add(Op(name="route", args=(rank, ways), attrs=(("axis", self.axis),), results=results))
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
        dtype: DType,
        *,
        new: bool = True,
    ) -> Ref:
        layout = replace(source, dims=(target.dims[0], *source.dims[1:]))
        value = Value(name=unique(made, self.taken) if new else made, type=TensorType(dtype=dtype, layout=layout))
        self._add(Op(name=name, args=(moved, *plan), attrs=(("axis", self.axis),), results=(value,)))
        return Ref(value.name)

    def _plain(
        self,
        name: str,
        args: tuple[Arg, ...],
        made: str,
        shape: tuple[int, ...],
        dtype: DType,
        *,
        attrs: tuple[tuple[str, Arg], ...] = (),
        new: bool = True,
    ) -> Ref:
        """An operation that leaves the rows of its last operand where they are."""
        value = Value(
            name=unique(made, self.taken) if new else made,
            type=TensorType(dtype=dtype, layout=Layout.replicated(shape)),
        )
        op = Op(name=name, args=args, attrs=attrs, results=(value,))
        rule = resolve(op, self.types)
        if rule is None:
            raise InternalError(f"{name} has no rule")
        *_, rows = op.refs()
        layout = self.types[rows].layout
        grouped = (Choice(axis=axis, factor="g" if axis == self.axis else "s") for axis in layout.sharded_axes)
        op = replace(op, choices=tuple(grouped if attrs else self._following(layout, rule.operands[-1], rule)))
        found = layouts(op, rule, self.types, self.sizes)
        if found is None:
            raise InternalError(f"{name} of {self.types[rows]} is cut in a way that its sizes do not allow")
        type = TensorType(dtype=dtype, layout=found[1][0])
        self._add(replace(op, results=(replace(value, type=type),)))
        return Ref(value.name)

    def _following(self, layout: Layout, dims: Dims, rule: OpRule) -> Iterator[Choice]:
        """The choices under which an operand keeps its layout."""
        for axis in axis_order(self.sizes):
            placed = layout.placement(axis)
            if isinstance(placed, Shard):
                before = 1
                for name in dims[placed.dim]:
                    after = before * rule.factor(name).size
                    if before <= placed.outer < after:
                        yield Choice(axis=axis, factor=name, outer=placed.outer // before)
                    before = after

    def _add(self, op: Op) -> None:
        self.types.update((value.name, value.type) for value in op.results)
        self.ops.append(replace(op, source=self.op.source))
