"""Layouts over the batch axes of values that have a row for each example but depend on no input of the batch.

Forward makes such values from constants, as positions and biases, or draws them, as the times of a diffusion model.
They are cut as all the operations that read them require.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from partc.ir.layout import Layout, Placement, Replicated, Shard, Sizes, Varying
from partc.ir.mesh import TIME_AXIS
from partc.ir.program import Choice, Op, Program, Region, TensorType, Value
from partc.rules import OpRule, placements
from partc.rules.tried import rule_of
from partc.sharding.disjoint_sets import DisjointSets

_Place = tuple[str, str, int]  # an input or a result of a region
_Places = Mapping[_Place, Sequence[str]]  # with the values of its calls


def with_cut_values(program: Program, axes: tuple[str, ...], summed: Collection[str]) -> Program:
    """Cut each whole value between calls as all its readers cut it: constants over `axes` without microbatches, others
    over all `axes`. The values `summed` are needed whole.
    """
    if math.prod(program.sizes[axis] for axis in axes) == 1:
        return program
    while True:
        found = _with_values_cut_by_readers(program, axes, summed)
        if found is program:
            return program
        program = found


def _with_values_cut_by_readers(program: Program, axes: tuple[str, ...], summed: Collection[str]) -> Program:
    """The program with the cuts that its regions require now; the same program if there are none."""
    over = {"setup": tuple(axis for axis in axes if axis != TIME_AXIS), "microbatch": axes, "step": ()}
    places: dict[_Place, list[str]] = {}
    for call in program.calls:
        for kind, names in (("input", call.args), ("result", call.results)):
            for index, name in enumerate(names):
                places.setdefault((call.region, kind, index), []).append(name)
    cuts = _cuts(program, over, places, {*program.returned, *summed})
    return _with_cuts(program, over, places, cuts) if cuts else program


def _cuts(
    program: Program, over: Mapping[str, tuple[str, ...]], places: _Places, summed: Collection[str]
) -> dict[str, tuple[Placement, Layout]]:
    """The values that all their readers cut alike, each with its placement on the batch axes and its layout.

    `over` has the axes that cut a value, by the phase of its region; the values `summed` are needed whole.
    """
    types = program.value_types()
    fixed = {*summed, *(value for _, value in program.updates)}
    whole: dict[str, tuple[str, ...]] = {}  # values that may be cut, with the axes
    for call in program.calls:
        ranks = over[program.region(call.region).phase]
        for name in call.results:
            placed = (types[name].layout.placement(axis) for axis in ranks)
            if ranks and name not in fixed and all(isinstance(place, Varying | Replicated) for place in placed):
                whole[name] = ranks
    alike: DisjointSets[str] = DisjointSets()  # values that must have one layout
    for first, *rest in places.values():
        for name in rest:
            alike.join(first, name)
    ways: dict[str, set[tuple[str, ...]]] = {}
    for name in types:
        ways.setdefault(alike.of(name), set()).add(whole.get(name, ()))
    wanted: dict[str, set[Placement | None]] = {}
    for (region, kind, index), (first, *_) in places.items():
        if kind == "input" and first in whole:
            wanted.setdefault(alike.of(first), set()).add(_wanted(program.region(region), index))
    found: dict[str, tuple[Placement, Layout]] = {}
    for name, ranks in whole.items():
        placement, *others = wanted.get(alike.of(name), {None})
        if isinstance(placement, Shard) and not others and ways[alike.of(name)] == {ranks}:
            layout = Layout.build(types[name].shape, dict.fromkeys(ranks, placement), program.sizes)
            if layout is not None:
                found[name] = placement, layout
    return found


def _with_cuts(
    program: Program,
    over: Mapping[str, tuple[str, ...]],
    places: _Places,
    cuts: Mapping[str, tuple[Placement, Layout]],
) -> Program:
    """The program in which these values are cut, as are the operations that compute them."""

    def cut(value: Value, name: str) -> Value:
        return replace(value, type=replace(value.type, layout=cuts[name][1])) if name in cuts else value

    def rewritten(region: Region) -> Region:
        graph = region.forward
        given = (places[region.name, "input", index][0] for index in range(len(graph.inputs)))
        graph = replace(graph, inputs=tuple(map(cut, graph.inputs, given)))
        made = [places[region.name, "result", index][0] for index in range(len(graph.outputs))]
        if cuts.keys().isdisjoint(made):
            return replace(region, forward=graph)
        parts: dict[str, Placement | None] = {}
        for output, name in zip(graph.outputs, made, strict=True):
            placement = cuts[name][0] if name in cuts else None
            parts[output] = placement if parts.get(output, placement) == placement else None
        ops = cut_as_read(graph.ops, region.types(graph), parts, over[region.phase], program.sizes)
        return replace(region, forward=replace(graph, ops=tuple(ops)))

    values = tuple(cut(value, value.name) for value in program.values)
    return replace(program, regions=tuple(map(rewritten, program.regions)), values=values)


def _wanted(region: Region, index: int) -> Placement | None:
    """The placement on the batch axes that all operations of a region require of an input; None if they differ."""
    graph, name = region.forward, region.forward.inputs[index].name
    types = region.types(graph)
    found: set[Placement | None] = {None for output in graph.outputs if output == name}
    for op in graph.ops:
        if name in op.refs():
            read = zip(op.refs(), _required(op, rule_of(op, types)), strict=True)
            found.update(placement for ref, placement in read if ref == name)
    return found.pop() if len(found) == 1 else None


def _required(op: Op, rule: OpRule | None) -> tuple[Placement | None, ...]:
    """The placement on the batch axes that an operation requires of each operand; None if it is not known."""
    if rule is None or not op.choices:
        return (None,) * len([*op.refs()])
    return placements(op, rule, op.choices[0])[0]


def cut_as_read(
    ops: Sequence[Op],
    types: Mapping[str, TensorType],
    wanted: Mapping[str, Placement | None],
    axes: Sequence[str],
    sizes: Sizes,
) -> list[Op]:
    """The same operations, with further cuts. An operation whose operands are all whole, such as an embedding of every
    example's positions, is cut as all readers of its results require. `wanted` has the placements of values that are
    read elsewhere; None: whole.
    """
    readers: dict[str, set[Placement | None]] = {name: {placement} for name, placement in wanted.items()}
    found: list[Op] = []
    for op in reversed(ops):
        rule = rule_of(op, types)
        if rule is not None and all(choice.factor is None for choice in op.choices):
            op = _cut_by_readers(op, rule, readers, axes, sizes)
        for name, placement in zip(op.refs(), _required(op, rule), strict=True):
            readers.setdefault(name, set()).add(placement)
        found.append(op)
    return found[::-1]


def _cut_by_readers(
    op: Op, rule: OpRule, readers: Mapping[str, set[Placement | None]], axes: Sequence[str], sizes: Sizes
) -> Op:
    """The operation, cut as all readers of its results cut them, if they agree and a factor allows it."""
    wanted = {index: readers[value.name] for index, value in enumerate(op.results) if value.name in readers}
    index, (placement, *others) = next(iter(wanted.items()), (0, (None,)))
    if others or not isinstance(placement, Shard):
        return op
    factor = factor_at(rule.results[index], rule, placement)
    if factor is None or not divides(rule, *factor, axes, sizes):
        return op
    choices = tuple(Choice(axis=axis, factor=factor[0], outer=factor[1]) for axis in axes)
    made = placements(op, rule, choices[0])[1]
    if any(not isinstance(place, Shard) or wanted.get(index, {place}) != {place} for index, place in enumerate(made)):
        return op
    pairs = zip(op.types, made, strict=True)
    found = [Layout.build(type.shape, dict.fromkeys(axes, place), sizes) for type, place in pairs]
    known = [layout for layout in found if layout is not None]
    return replace(op, choices=choices).laid_out(known) if len(known) == len(found) else op


def divides(rule: OpRule, name: str, outer: int, axes: Sequence[str], sizes: Sizes) -> bool:
    """Whether the batch axes together divide a factor after its first `outer` parts.

    Four ranks divide a batch of 24. If the batch is viewed as 2 x 12, they do not divide the factor of size 2. An
    operation with a sharded form runs on one range of the factor for each rank of one axis.
    """
    factor, cutting = rule.factor(name), [axis for axis in axes if sizes[axis] > 1]
    if cutting and name in dict(rule.sharded) and (outer > 1 or len(cutting) > 1 or TIME_AXIS in cutting):
        return False
    ways = math.prod(sizes[axis] for axis in axes)
    return factor.kind != "blocked" and factor.size % (outer * ways) == 0


def factor_at(dims: Sequence[Sequence[str]], rule: OpRule, placement: Shard) -> tuple[str, int] | None:
    """The factor that a shard of a tensor cuts, and the shard's `outer` within this factor; None if there is none.

    `dims` has the names of the factors of each dimension.
    """
    sizes = {factor.name: factor.size for factor in rule.factors}
    before = 1
    for name in dims[placement.dim]:
        if placement.outer % before == 0 and placement.outer < before * sizes[name]:
            return name, placement.outer // before
        before *= sizes[name]
    return None
