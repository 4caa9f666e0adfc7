"""The bytes that a step communicates over each mesh axis, and the operations that ranks compute redundantly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from partc.communication.events import message
from partc.communication.exchanges import graph_of
from partc.communication.execution import Execution
from partc.errors import Source
from partc.ir.collectives import collectives_of, received
from partc.ir.mesh import PIPELINE_AXIS, TIME_AXIS
from partc.ir.program import GraphKind, Op, Program, Region, TensorType
from partc.rules import flops, resolve
from partc.sharding.choices import axis_order, choice_on


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedOp:
    """An operation that every rank of an axis repeats in full."""

    op: str
    place: str  # the region and the operation's result: "block.scores"
    axis: str
    flops: int  # repeated per step, by all ranks of one group together
    rule: bool  # False: it has no rule, so it must be repeated
    source: Source | None = None


def communication(program: Program) -> dict[str, int]:
    """Bytes that one rank receives per step over each axis, at the pipeline coordinate that receives most.

    A collective over several axes at once is counted under their joined names ("dp,tp"). The loss is not counted.
    """
    busiest: dict[str, int] = {name: 0 for name in program.mesh.names}
    graphs = _graph_traffic(program)
    for place in range(program.mesh.axis(PIPELINE_AXIS)):
        found: Counter[str] = Counter()
        actions = [steps for _, steps in Execution(program, place).step()]
        times = Counter(map(id, actions))
        for steps in {id(steps): steps for steps in actions}.values():
            here: Counter[str] = Counter()
            for step in steps:
                each = step.statement
                for collective in step.collectives if each.subject != "result" or program.results else ():
                    here[",".join(collective.axes) or PIPELINE_AXIS] += received(collective, program.sizes)
                if each.verb == "receive" and (sent := message(program, step)):
                    here[PIPELINE_AXIS] += sent.bytes
                elif each.subject in ("F", "B", "I", "W"):
                    here.update(graphs[program.call(step.stage, each.of).region, each.subject])
            found.update({axis: size * times[id(steps)] for axis, size in here.items()})
        for axis, size in found.items():
            busiest[axis] = max(busiest.get(axis, 0), size)
    return busiest


def _graph_traffic(program: Program) -> dict[tuple[str, GraphKind], Counter[str]]:
    """The bytes that a rank receives over each axis inside every graph."""
    found: dict[tuple[str, GraphKind], Counter[str]] = {}
    kinds: tuple[GraphKind, ...] = ("F", "B", "I", "W")
    for region in program.regions:
        for kind in kinds:
            counts = found[region.name, kind] = Counter()
            graph = graph_of(region, kind)
            types = region.types(graph) if graph is not None else {}
            for op in graph.ops if graph is not None else ():
                for each in collectives_of(op, types, program.sizes):
                    counts[each.group] += received(each, program.sizes)
    return found


def replicated_ops(program: Program) -> tuple[ReplicatedOp, ...]:
    """The operations without a rule and the matrix products that all ranks of an axis repeat, the costliest first.

    `program` is the result of annotate: every operation has its choices, and shapes are still global.
    """
    found: list[ReplicatedOp] = []
    for region in program.regions:
        types = region.types(region.forward)
        calls = len(program.calls_to(region.name))
        for op in region.forward.ops:
            found.extend(_repeated(op, region, types, program, calls))
    return tuple(sorted(found, key=lambda item: (-item.flops, item.place, item.axis)))


def _repeated(
    op: Op, region: Region, types: dict[str, TensorType], program: Program, calls: int
) -> Iterator[ReplicatedOp]:
    rule = resolve(op, types)
    work = flops(op, rule) if rule is not None else sum(math.prod(value.type.shape) for value in op.results)
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
