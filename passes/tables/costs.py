"""The bytes that a rank sends in a step for a table: cut in some way, or whole with sums of its gradient.

Ids and vectors of all microbatches together have the bytes of a batch that is computed at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from partc.ir.layout import Layout, Sizes
from partc.ir.mesh import TIME_AXIS
from partc.ir.program import FLOATING, ITEMSIZE, TensorType
from partc.passes.tables.lookups import ROWS, Cut, Lookup, Lookups, Slot, columns, cut_type
from partc.rules import resolve
from partc.sharding.choices import layouts
from partc.sharding.reshard import plan
from partc.sharding.table_placement import Starts

_COPIES = 0.5  # an exchange by rows copies vectors four times; copying a byte costs an eighth of sending it
LATENCY_BYTES = 1 << 17  # the bytes that a link moves during a message's latency: 25 GB/s in 5 us
# The messages of an exchange to each other rank: ids, vectors and their gradients; for spread tables also the counts.
_OF_WHOLE, _OF_SPREAD = 3, 4
LARGE_BYTES = 1 << 26  # smaller tables are gathered with the other parameters of their call
_NODE = 8  # devices in a node: a ring's bytes leave a node once, an exchange's once for each device


@dataclass(frozen=True)
class Costs:
    """The bytes of each cut of a table, under a ZeRO stage."""

    lookups: Lookups
    zero: int
    _known: dict[tuple[Slot, str, Cut], int] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of the axes for a batch without microbatches."""
        return {**self.lookups.sizes, TIME_AXIS: 1}

    def moved(self, name: str, cut: Cut) -> float:
        """The bytes that a rank sends in a step to exchange ids and vectors."""
        pairs = ((slot, lookup) for slot in self.lookups.slots[name] for lookup in self.lookups.of[slot])
        return sum(min(self._gathered(*pair, cut), self._exchanged(*pair, cut)) for pair in pairs)

    def exchanges(self, slot: Slot, lookup: Lookup, cut: Cut) -> bool:
        """Whether ids travel to the ranks of their rows, rather than to all ranks."""
        return self._exchanged(slot, lookup, cut) < self._gathered(slot, lookup, cut)

    def _gathered(self, slot: Slot, lookup: Lookup, cut: Cut) -> int:
        """The bytes that a rank sends in a step if all ranks look up all ids."""
        key = slot, lookup.op.result.name, cut
        if key not in self._known:
            self._known[key] = self._to_all(slot, lookup, cut)
        return self._known[key]

    def _to_all(self, slot: Slot, lookup: Lookup, cut: Cut) -> int:
        total, types = 0, dict(self.lookups.types[slot[0]])
        types[slot[1]] = cut_type(types[slot[1]], cut, self.sizes)
        ops = self.lookups.recuts(slot, lookup, cut)
        assert ops is not None
        for op in ops:
            found = layouts(op, resolve(op, types), types, self.sizes)
            assert found is not None
            for ref, wanted in zip(op.refs(), found[0], strict=True):
                if types[ref].dtype not in FLOATING:
                    total += self._resharded(types[ref].layout, wanted, types[ref], gradient=False)
            types[op.result.name] = op.result.type
        before = self.lookups.types[slot[0]][ops[-1].result.name]
        return total + self._resharded(ops[-1].result.type.layout, before.layout, before, gradient=True)

    def _exchanged(self, slot: Slot, lookup: Lookup, cut: Cut) -> float:
        """The bytes that a rank sends in a step if each rank looks up the ids of its own rows."""
        types, op = self.lookups.types[slot[0]], lookup.op
        ids = types[lookup.ids]
        masked = any(each.name == "masked_fill" for each, _ in lookup.after)
        padded = len(op.args) > 2 and not masked  # the row without a gradient is on one rank
        ((axis, factor), *others) = cut
        home = ids.layout.sharded_axes
        if (
            padded
            or others
            or factor != ROWS
            or axis not in home
            or any(choice.axis in home for choice in columns(op))
            or any(sub.axes for sub in types[slot[1]].layout.dims[0])
        ):
            return math.inf
        vectors = (lookup.cast or op).result.type.local_bytes(self.sizes)
        ranks = self.sizes[axis]
        return (ids.local_bytes(self.sizes) + 2 * vectors) * (ranks - 1) / ranks

    def _resharded(self, source: Layout, target: Layout, type: TensorType, *, gradient: bool) -> int:
        if not gradient:
            source, target = replace(source, varying=()), replace(target, varying=())
        steps = plan(source, target, sizes=self.sizes, itemsize=ITEMSIZE[type.dtype], needs_grad=gradient)
        return sum(step.forward + step.backward for step in steps)

    def spread(self, name: str, cut: Cut) -> float:
        """The bytes that a rank sends in a step for a table that is cut, plus the charge for bytes that it copies."""
        copied = 0.0
        for slot in self.lookups.slots[name]:
            for lookup in self.lookups.of[slot]:
                if self.exchanges(slot, lookup, cut):
                    copied += _COPIES * (lookup.cast or lookup.op).result.type.local_bytes(self.sizes)
        return self.moved(name, cut) + copied

    def whole(self, name: str) -> int:
        """The bytes that a rank sends in a step for a table that is not cut: of its gradient, and of ZeRO's gathers."""
        times = self.lookups.program.microbatches
        return self._bytes(name) * {0: 2, 1: 2, 2: 1 + times, 3: 3 * times}[self.zero]

    def starts(self, ranks: int) -> Starts:
        """The latency of the messages in a step's exchanges between these ranks, in bytes."""
        each = LATENCY_BYTES * (ranks - 1) * self.lookups.program.microbatches
        return Starts(whole=_OF_WHOLE * each, spread=_OF_SPREAD * each)

    def is_large(self, name: str) -> bool:
        return self._bytes(name) >= LARGE_BYTES

    def _bytes(self, name: str) -> int:
        return self.lookups.parameters[name].type.local_bytes(self.sizes)

    def saves(self, name: str, cut: Cut) -> bool:
        """Whether a table is large and exchanging its vectors costs less per step than summing its gradient and
        gathering it.

        Sums share messages with other gradients; vectors need messages of their own.
        """
        lookups = sum(len(self.lookups.of[slot]) for slot in self.lookups.slots[name])
        ranks = math.prod(self.sizes[axis] for axis, _ in cut)
        started = 2 * LATENCY_BYTES * (ranks - 1) * lookups * self.lookups.program.microbatches
        moved = self.moved(name, cut) * (_NODE if ranks > _NODE else 1)
        return self.is_large(name) and moved + started < self.whole(name)
