"""What a finished plan moves and repeats: bytes per axis and step, and operations done more than once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from partc.codegen.collectives import local_bytes, moved_bytes
from partc.errors import Source
from partc.mesh import PIPELINE_AXIS, TIME_AXIS
from partc.program import Op, Program, Region, TensorType
from partc.reductions import Reductions
from partc.rules import flops, resolve
from partc.sharding import axis_order, choice_on
from partc.turns import moves_of_step


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedOp:
    """An operation that every rank of an axis repeats in full."""

    op: str
    place: str  # region and result: "block.scores"
    axis: str
    flops: int  # repeated per step, by all ranks of one group together
    rule: bool  # False: it has no rule, so that nothing else is possible
    source: Source | None = None


def communication(program: Program) -> dict[str, int]:
    """Bytes that one rank receives per step over each axis, at the pipeline coordinate that receives most.

    Gradients that are summed over several axes at once are counted under their names joined: "dp,tp".
    """
    busiest: dict[str, int] = {name: 0 for name in program.mesh.names}
    for place in range(program.mesh.axis(PIPELINE_AXIS)):
        found: dict[str, int] = {}
        kinds = (_collectives, _reductions, _transfers)
        each = (kind(program, stage) for stage in program.stages_at(place) for kind in kinds)
        for axis, size in chain(_parts(program, place), *each):
            found[axis] = found.get(axis, 0) + size
        for axis, size in found.items():
            busiest[axis] = max(busiest.get(axis, 0), size)
    return busiest


def _collectives(program: Program, stage: int) -> Iterator[tuple[str, int]]:
    regions = {region.name: list(_region_bytes(region, program)) for region in program.regions}
    phases = {region.name: region.phase for region in program.regions}
    for call in program.calls:
        if call.stage == stage and phases[call.region] != "setup":
            times = program.microbatches if phases[call.region] == "microbatch" else 1
            for axis, size in regions[call.region]:
                yield axis, times * size


def _region_bytes(region: Region, program: Program) -> Iterator[tuple[str, int]]:
    for graph in region.graphs:
        types = region.types(graph)
        for op in graph.ops:
            size = moved_bytes(op, types, program.sizes)
            if size:
                yield str(dict(op.attrs)["axis"]), size


def _reductions(program: Program, stage: int) -> Iterator[tuple[str, int]]:
    """Gradients, once per step: over the axes where ranks hold copies, and over the stages that share a weight."""
    reductions = Reductions(program, stage)
    for bucket in reductions.buckets:
        for dtype, size in reductions.pieces(bucket.parameters) if not bucket.scattered else ():
            for part in reductions.sums(dtype, size, bucket.over):
                yield ",".join(part.axes), part.received(math.prod(program.sizes[axis] for axis in part.axes))
    for parameter in reductions.trained:
        sharers = reductions.sharers(parameter)
        if sharers:
            size = local_bytes(parameter.type, program.sizes)
            yield PIPELINE_AXIS, 2 * size * (len(sharers) - 1) // len(sharers)


def _parts(program: Program, place: int) -> Iterator[tuple[str, int]]:
    """What ranks hold in parts: gathered and scattered around calls, and once per step."""
    for move in moves_of_step(program, place):
        yield ",".join(move.axes), move.received


def _transfers(program: Program, stage: int) -> Iterator[tuple[str, int]]:
    types = program.value_types()
    for transfer in program.transfers:
        if not program.travels(transfer):
            continue
        size = program.microbatches * local_bytes(types[transfer.value], program.sizes)
        if transfer.target == stage or (transfer.gradient and transfer.source == stage):
            yield PIPELINE_AXIS, size


def replicated_ops(program: Program) -> tuple[ReplicatedOp, ...]:
    """Operations without a rule and matrix products that an axis repeats, the costliest first.

    `program` is as annotate leaves it: every operation has its choices, and shapes are still global.
    """
    found: list[ReplicatedOp] = []
    for region in program.regions:
        types = region.types(region.forward)
        calls = sum(call.region == region.name for call in program.calls)
        for op in region.forward.ops:
            found.extend(_repeated(op, region, types, program, calls))
    return tuple(sorted(found, key=lambda item: (-item.flops, item.place, item.axis)))


def _repeated(
    op: Op, region: Region, types: dict[str, TensorType], program: Program, calls: int
) -> Iterator[ReplicatedOp]:
    rule = resolve(op, types)
    work = flops(op, rule) if rule is not None else sum(_elements(value.type) for value in op.results)
    if not op.results or not work or region.phase == "setup" or not any(True for _ in op.refs()):
        return
    for axis in axis_order(program.sizes):
        choice = choice_on(op, axis)
        if axis == TIME_AXIS or (choice is not None and choice.factor is not None):
            continue
        shared = 1
        for other in axis_order(program.sizes):
            chosen = choice_on(op, other)
            if other != axis and chosen is not None and chosen.factor is not None:
                shared *= program.sizes[other]
        repeated = work * calls * (program.sizes[axis] - 1) // shared
        place = f"{region.name}.{op.results[0].name}"
        yield ReplicatedOp(op=op.name, place=place, axis=axis, flops=repeated, rule=rule is not None, source=op.source)


def _elements(type: TensorType) -> int:
    count = 1
    for size in type.shape:
        count *= size
    return count
