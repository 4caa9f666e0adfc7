"""Cuts by sequence axes inside the cuts by weight axes, where they do not cut sequences.

Attention by heads changes [16@cp, 8@tp], positions and heads, to [16, 8@tp,cp] by an all-to-all over cp. In the order
of the mesh's axes it would be [16, 8@cp,tp], which also needs an all-to-all over tp.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace

from partc.ir.layout import Shard
from partc.ir.program import Program, TensorType
from partc.rules import RING, OpRule
from partc.rules.tried import rule_of
from partc.sharding.assignment import Alternative, Solution
from partc.sharding.choices import placed_axes, weight_axes
from partc.sharding.disjoint_sets import DisjointSets
from partc.sharding.placements import Places


def inside_weight_axes(program: Program, axis: str, places: Places, solution: Solution) -> Solution:
    """Move a sequence axis' cuts inside those of the weight axes, for values that are cut only within a region, such as
    heads.
    """
    order = placed_axes(program.sizes)
    later = order[order.index(axis) + 1 :]
    ways = math.prod(program.sizes[other] for other in weight_axes(program.sizes) if other in later)
    if ways == 1:
        return solution
    alike: DisjointSets[Hashable] = DisjointSets()
    for wire in places.problem.wires:
        made = solution.chosen[wire.source].makes[wire.output]
        for reader, index in wire.readers:
            if isinstance(made, Shard) and made == solution.chosen[reader].wants[index]:
                alike.join(wire.source, reader)
    fixed = {alike.of(owner) for owner in _crossing(program, places)}
    cuts = {name: choice for name, choice in solution.chosen.items() if _cuts(choice)}
    rules, parts = _rules(program), ways * program.sizes[axis]
    fixed |= {alike.of(name) for name, choice in cuts.items() if not _divides(choice, rules.get(name), parts)}
    moved = {name: _inside(choice, ways) for name, choice in cuts.items() if alike.of(name) not in fixed}
    return replace(solution, chosen={**solution.chosen, **moved})


def _crossing(program: Program, places: Places) -> set[Hashable]:
    """The owners of values that microbatches pass between calls, and of inputs: these are cut along sequences."""
    phases = {name: program.region(call.region).phase for call in program.calls for name in call.results}
    names = (value.name for value in program.values if phases.get(value.name, "microbatch") == "microbatch")
    return {places.owners["value", name] for name in names}


def _rules(program: Program) -> Mapping[Hashable, OpRule | None]:
    """The rule of each operation, by the node that decides it."""
    found: dict[Hashable, OpRule | None] = {}
    for region in program.regions:
        types: Mapping[str, TensorType] = region.types(region.forward)
        for index, op in enumerate(region.forward.ops):
            found["op", region.name, index] = rule_of(op, types)
    return found


def _cuts(choice: Alternative) -> bool:
    return any(isinstance(placement, Shard) for placement in (*choice.wants, *choice.makes))


def _divides(choice: Alternative, rule: OpRule | None, parts: int) -> bool:
    """Whether all axes together cut the factor into equal parts; values that cross calls have no rule."""
    if not isinstance(choice.label, tuple):
        return isinstance(choice.label, Shard)
    name, outer = choice.label
    if rule is None or name in (RING, *rule.ring) or name in dict(rule.sharded):
        return False
    return name is not None and any(each.name == name and each.size % (outer * parts) == 0 for each in rule.factors)


def _inside(choice: Alternative, ways: int) -> Alternative:
    """The same choice with each dimension cut after `ways` times as many elements."""

    def moved(placement: Hashable) -> Hashable:
        return Shard(placement.dim, placement.outer * ways) if isinstance(placement, Shard) else placement

    label = (choice.label[0], choice.label[1] * ways) if isinstance(choice.label, tuple) else moved(choice.label)
    return replace(choice, label=label, wants=tuple(map(moved, choice.wants)), makes=tuple(map(moved, choice.makes)))
