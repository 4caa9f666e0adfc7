"""The choice of each table's cut: by pins, or else by the bytes that it moves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from partc.errors import PartcError
from partc.ir.layout import Replicated, Shard
from partc.passes.tables.costs import Costs
from partc.passes.tables.lookups import COLUMNS, ROWS, Cut, Lookups, Slot
from partc.rules.updates import UpdateRule
from partc.sharding.choices import placed_axes
from partc.sharding.pins import Pin
from partc.sharding.placements import expert_weights


@dataclass(frozen=True)
class Choices:
    """Chooses the cuts of tables by pins, costs and the optimizer's rules."""

    lookups: Lookups
    costs: Costs
    pins: Sequence[Pin]
    rules: Mapping[str, UpdateRule]

    def chosen(self) -> dict[str, Cut]:
        """The cut of each table. Tables that calls read in the same slot of a region are all cut alike, or none is."""
        found: dict[str, Cut] = {}
        for names in self.lookups.alike():
            cuts = [each for each in self.lookups.cuts(names) if all(self._pinned(name, each) for name in names)]
            pinned = any(self.pins_of(name) for name in names)
            if not cuts and not pinned:
                continue
            sparse = any(self.lookups.parameters[name].sparse for name in names)
            if any(self.rules[name].kind.by_rows for name in names):  # their states need whole rows
                cuts = [each for each in cuts if ROWS in dict(each).values()] or cuts
            cost = self.costs.spread if self._is_alone(names) else self.costs.moved
            costs = {cut: sum(cost(name, cut) for name in names) for cut in cuts}
            best = min(costs, key=lambda cut: costs[cut], default=None)
            if pinned and best is None:
                raise self._unpinnable(names)
            if best is None:
                continue
            if sparse or pinned or self.forced or all(self.costs.saves(name, best) for name in names):
                found |= dict.fromkeys(names, best)
        return found

    def _is_alone(self, names: Sequence[str]) -> bool:
        """Whether the same regions read no other table that could be cut, so that the table's exchange is not
        shared.
        """
        regions = {region for name in names for region, _ in self.lookups.slots[name]}
        return not any(
            self.lookups.of.keys() >= {*slots}
            and (self.costs.is_large(name) or self.lookups.parameters[name].sparse)
            and not regions.isdisjoint(region for region, _ in slots)
            for name, slots in self.lookups.slots.items()
            if name not in names
        )

    @cached_property
    def forced(self) -> bool:
        """Whether the axis ep is used for tables: there are no experts, and most of the model is tables."""
        names = {op.name for region in self.lookups.program.regions for op in region.forward.ops}
        if not self.lookups.program.mesh.expert_axes or "expert_matmul" in names:
            return False
        read = {name for name, slots in self.lookups.slots.items() if slots and self.lookups.of.keys() >= {*slots}}
        elements = {name: math.prod(item.type.shape) for name, item in self.lookups.parameters.items()}
        return 2 * sum(elements[name] for name in read) > sum(elements.values())

    @cached_property
    def experts(self) -> frozenset[Slot]:
        """The weights of products by expert."""
        found = (
            (each.name, expert_weights(each.forward, self.lookups.types[each.name]))
            for each in self.lookups.program.regions
        )
        return frozenset((region, weight) for region, weights in found for weight in weights)

    def pins_of(self, name: str) -> list[Pin]:
        """The pins that name one of the table's axes."""
        if not self.pins:
            return []
        over = {axis for axis, size in self.lookups.sizes.items() if size > 1} - {*placed_axes(self.lookups.sizes)}
        if not self.experts.isdisjoint(self.lookups.slots[name]):  # the pass `experts` checks their pins
            over -= {*self.lookups.program.mesh.expert_axes}
        return [
            pin
            for pin in self.pins
            if pin.matches(name) and any(axis in over for entries in pin.dims for _, axes in entries for axis in axes)
        ]

    def _pinned(self, name: str, cut: Cut) -> bool:
        """Whether the pins of a table allow the cut."""
        dims = {ROWS: 0, COLUMNS: 1}
        wanted = ((pin.placement(axis), factor) for pin in self.pins_of(name) for axis, factor in cut)
        return all(isinstance(found, Replicated) or found == Shard(dims[factor]) for found, factor in wanted)

    def _unpinnable(self, names: Sequence[str]) -> PartcError:
        name = next(name for name in names if self.pins_of(name))
        (pin, *_) = self.pins_of(name)
        return PartcError(
            "P0302",
            f"--shard {pin.pattern}={pin.text}: {name} is not a table that can be cut in this way",
            help="dp and cp can cut a table that only lookups read: its rows over one of the two, or its columns, "
            "if their number is a multiple of the axis",
        )
