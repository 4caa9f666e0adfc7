"""Cut embedding tables by rows over the batch axis, where ZeRO would gather them whole.

    param table.weight: f32[4096, 8] vary(dp)             param table.weight: f32[4096@dp, 8]
    x = embedding(table.weight, ids)  # f32[16@dp, 8]  ->  x = embedding(table.weight, ids)  # f32[16, 8] partial(dp)

Every rank looks up the ids of all ranks in its rows; partition gathers the ids and scatters the sums of the vectors.
Backward gathers the vectors' gradients. Of a bag each rank sums its rows first. No rank ever holds a whole table, its
gradient or its optimizer state, and nothing as large as the table moves.

A table is cut if only lookups read it and the exchange of vectors moves fewer bytes than gathers and scatters of the
table would. Rows of zeros are added where the axis does not divide them; no id looks them up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from partc import fuel
from partc.ir.layout import Layout, Shard, SubDim
from partc.ir.mesh import TIME_AXIS
from partc.ir.program import FLOATING, ITEMSIZE, Choice, Op, Parameter, Program, Ref, Region, TensorType, Value
from partc.rules import resolve
from partc.sharding.choices import batch_axes, choice_on, layouts

_ROWS = "v"  # the factor of lookups' rule
_LARGE = 1 << 26  # bytes of a table; smaller ones are gathered with the other parameters of their call
Slot = tuple[str, str]  # a region and the name of one of its parameters


def tables(
    program: Program, *, zero: int = 0, zero_axes: tuple[str, ...] = (), cut_tables: frozenset[str] | None = None
) -> Program:
    """Cut the tables that ZeRO would gather; `cut_tables` names those that a training has cut, for its evaluation."""
    axes = [axis for axis in batch_axes(program.sizes) if axis != TIME_AXIS]
    over = [axis for axis in zero_axes if program.sizes.get(axis, 1) > 1]
    if not zero or len(axes) != 1 or over != axes:
        return program
    found = _Tables(program, axes[0], zero)
    names = found.chosen() if cut_tables is None else cut_tables
    return found.cut(names) if names and fuel.allowed("tables cut by rows") else program


class _Tables:
    """The lookups of a program, and the parameters that they alone read."""

    def __init__(self, program: Program, axis: str, zero: int) -> None:
        self.program = program
        self.axis = axis
        self.ways = program.sizes[axis]
        self.zero = zero
        regions = {region.name: region for region in program.regions}
        self.lookups: dict[Slot, list[Op]] = {}
        self.bags: dict[Slot, Op] = {}  # sums by the lookup that they alone read
        for region in program.regions:
            for name, readers in region.forward.readers().items():
                alone = len(readers) == 1 and readers[0].name == "sum" and name not in region.forward.outputs
                if alone and self._is_batched(readers[0]):
                    self.bags[region.name, name] = readers[0]
            for value in region.params:
                readers = [op for op in region.forward.ops if value.name in op.refs()]
                if region.phase == "microbatch" and readers and all(self._may_cut(op, value) for op in readers):
                    self.lookups[region.name, value.name] = readers
        self.slots: dict[str, list[Slot]] = {parameter.name: [] for parameter in program.parameters}
        for call in program.calls:
            for value, name in zip(regions[call.region].params, call.params, strict=True):
                self.slots[name].append((call.region, value.name))

    def _may_cut(self, op: Op, table: Value) -> bool:
        """Whether an operation looks up rows of an uncut table for ids that the batch axis cuts."""
        if op.name != "embedding" or op.args[0] != Ref(table.name) or [*op.refs()].count(table.name) > 1:
            return False
        return self._is_batched(op) and not any(sub.axes for sub in table.type.layout.dims[0])

    def _is_batched(self, op: Op) -> bool:
        """Whether the batch axis cuts a factor of the operation's result."""
        cut = choice_on(op, self.axis)
        placed = op.result.type.layout.placement(self.axis) if len(op.results) == 1 else None
        return cut is not None and cut.factor is not None and isinstance(placed, Shard)

    def chosen(self) -> frozenset[str]:
        """The tables to cut. The calls of a region are alike: of the tables of one slot, all are cut or none."""
        open = {parameter.name for parameter in self.program.parameters if self._saves(parameter)}
        while True:
            whole = {slot for name, slots in self.slots.items() if name not in open for slot in slots}
            left = {name for name in open if whole.isdisjoint(self.slots[name])}
            if left == open:
                return frozenset(open)
            open = left

    def _saves(self, parameter: Parameter) -> bool:
        """Whether an exchange of vectors moves fewer bytes in a step than gathers and scatters of a large table."""
        slots = self.slots[parameter.name]
        table = math.prod(parameter.type.shape) * ITEMSIZE[parameter.type.dtype]
        if not parameter.trainable or parameter.type.dtype not in FLOATING or table < _LARGE:
            return False
        if not slots or any(slot not in self.lookups for slot in slots) or parameter.aliases:
            return False
        times = self.program.microbatches
        whole = table * {1: 2, 2: 1 + times, 3: 3 * times}[self.zero]
        found = ((slot[0], op) for slot in slots for op in self.lookups[slot])
        made = (self.bags.get((region, op.result.name), op) for region, op in found)
        vectors = sum(op.result.type.local_bytes(self.program.sizes) for op in made) * self.ways
        return 2 * times * vectors < whole

    def cut(self, names: frozenset[str]) -> Program:
        slots = {slot for name in names for slot in self.slots.get(name, ())}
        parameters = tuple(
            replace(item, type=self._rows(item.type), holds=self._holds(item)) if item.name in names else item
            for item in self.program.parameters
        )
        regions = tuple(
            self._region(region, {name for each, name in slots if each == region.name})
            for region in self.program.regions
        )
        return replace(self.program, parameters=parameters, regions=regions)

    def _region(self, region: Region, names: set[str]) -> Region:
        if not names:
            return region
        params = tuple(
            replace(value, type=self._rows(value.type)) if value.name in names else value for value in region.params
        )
        types = region.types(region.forward) | {value.name: value.type for value in params}
        cut = {op.result.name: _ROWS for name in names for op in self.lookups[region.name, name]}
        bags = (self.bags.get((region.name, name)) for name in tuple(cut))
        cut |= {bag.result.name: "partial0" for bag in bags if bag is not None}
        ops = []
        for op in region.forward.ops:
            if op.results and op.results[0].name in cut:
                op = self._recut(op, cut[op.result.name], types)
                types[op.result.name] = op.result.type
            ops.append(op)
        return replace(region, params=params, forward=replace(region.forward, ops=tuple(ops)))

    def _recut(self, op: Op, factor: str, types: Mapping[str, TensorType]) -> Op:
        """The operation with another factor on the axis. Time still cuts each rank's own part of the batch."""
        batch = choice_on(op, self.axis)
        assert batch is not None
        choices = tuple(
            Choice(axis=self.axis, factor=factor)
            if choice is batch
            else replace(choice, outer=choice.outer * self.ways)
            if choice.axis == TIME_AXIS and choice.factor == batch.factor
            else choice
            for choice in op.choices
        )
        op = replace(op, choices=choices)
        found = layouts(op, resolve(op, types), types, self.program.sizes)
        assert found is not None  # the batch is a multiple of its axes, and the rows are padded
        return replace(op, results=(replace(op.result, type=replace(op.result.type, layout=found[1][0])),))

    def _rows(self, type: TensorType) -> TensorType:
        """The table with its rows over the axis, and as many rows as that needs."""
        (rows,), *others = type.layout.dims
        padded = -(-rows.size // self.ways) * self.ways
        varying = tuple(axis for axis in type.layout.varying if axis != self.axis)
        return replace(type, layout=Layout(((SubDim(padded, (self.axis,)),), *others), varying=varying))

    def _holds(self, parameter: Parameter) -> tuple[int, ...]:
        return parameter.holds or (parameter.type.shape if parameter.type.shape[0] % self.ways else ())
