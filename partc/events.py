"""What every rank communicates in a step, in order: the events that a finished program leads to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from partc.errors import Source
from partc.layout import Sizes
from partc.mesh import PIPELINE_AXIS, Mesh
from partc.program import Action, Call, Graph, Program, Region, Value

MOVING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """An operation that every rank of a group enters together.

    The group is the ranks that differ on `axes`; with `stages`, the ranks of those stages that agree
    on every other axis.
    """

    op: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    attrs: tuple[tuple[str, object], ...] = ()
    stages: tuple[int, ...] = ()
    action: str = ""
    source: Source | None = None

    @property
    def content(self) -> tuple[object, ...]:
        """What all ranks must agree on."""
        return self.op, self.shape, self.dtype, self.attrs

    def __str__(self) -> str:
        where = f"stages {self.stages}" if self.stages else " and ".join(self.axes)
        return f"{self.action}: {self.op} of {self.dtype}{list(self.shape)} over {where}{_at(self.source)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A send, which is posted and doesn't wait, or a receive, which does."""

    kind: Literal["send", "recv"]
    value: str
    stage: int  # of the other rank, which agrees on every other axis
    microbatch: int
    shape: tuple[int, ...]
    dtype: str
    action: str = ""

    @property
    def content(self) -> tuple[object, ...]:
        """What both ends must agree on."""
        return self.value, self.microbatch, self.shape, self.dtype

    def __str__(self) -> str:
        way = "to" if self.kind == "send" else "from"
        return f"{self.action}: {self.kind} of {self.value} {self.dtype}{list(self.shape)} {way} stage {self.stage}"


Event = Collective | Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationPlan:
    """Every rank's events: those of its stage, unless `overrides` gives the rank its own."""

    mesh: Mesh
    stages: tuple[tuple[Event, ...], ...]
    overrides: Mapping[int, tuple[Event, ...]] = field(default_factory=dict)

    def of(self, rank: int) -> tuple[Event, ...]:
        found = self.overrides.get(rank)
        return self.stages[self.mesh.coordinate(rank).get(PIPELINE_AXIS, 0)] if found is None else found


def events(program: Program) -> CommunicationPlan:
    """The communication of one step, set-up included, as the emitted package does it."""
    stages = tuple(tuple(_Stage(program, stage).run()) for stage in range(program.stages))
    return CommunicationPlan(mesh=program.mesh, stages=stages)


class _Stage:
    """Collects one stage's events."""

    def __init__(self, program: Program, stage: int) -> None:
        self.program = program
        self.stage = stage
        self.sizes: Sizes = program.sizes
        self.regions = {region.name: region for region in program.regions}
        self.calls = [call for call in program.calls if call.stage == stage]
        self.types = program.value_types()

    def run(self) -> Iterator[Event]:
        yield from self._of_phase("setup")
        yield from self._of_phase("step")
        blocks: dict[str, tuple[Collective, ...]] = {}
        for action in self.program.schedule[self.stage]:
            if action.kind in ("F", "B"):
                if action.kind not in blocks:
                    blocks[action.kind] = tuple(self._compute(action.kind))
                yield from (_during(event, action) for event in blocks[action.kind])
            elif action.kind == "REDUCE_GRAD":
                yield from self._reductions()
            else:
                yield from self._transfers(action)
        yield from self._loss()

    def _of_phase(self, phase: str) -> Iterator[Collective]:
        for call in self.calls:
            region = self.regions[call.region]
            if region.phase == phase:
                yield from self._collectives(region, region.forward, phase)

    def _compute(self, kind: str) -> Iterator[Collective]:
        calls: list[Call] = [call for call in self.calls if self.regions[call.region].phase == "microbatch"]
        for call in calls if kind == "F" else reversed(calls):
            region = self.regions[call.region]
            graph = region.forward if kind == "F" else region.backward
            if graph is not None:
                yield from self._collectives(region, graph, kind)

    def _collectives(self, region: Region, graph: Graph, action: str) -> Iterator[Collective]:
        values: dict[str, Value] = {value.name: value for value in region.params} | graph.definitions()
        for op in graph.ops:
            if op.name in MOVING:
                attrs = dict(op.attrs)
                operand = values[next(op.refs())].type
                yield Collective(
                    op=op.name,
                    axes=(str(attrs.pop("axis")),),
                    shape=operand.layout.local_shape(self.sizes),
                    dtype=operand.dtype,
                    attrs=tuple(attrs.items()),
                    action=action,
                    source=op.source,
                )

    def _transfers(self, action: Action) -> Iterator[Transfer]:
        forward = action.kind.endswith("_F")
        send = action.kind.startswith("SEND")
        leaving = send == forward  # values leave where they are made; their gradients come back there
        for transfer in self.program.transfers:
            mine, other = (transfer.source, transfer.target) if leaving else (transfer.target, transfer.source)
            if mine == self.stage and (forward or transfer.gradient):
                type = self.types[transfer.value]
                yield Transfer(
                    kind="send" if send else "recv",
                    value=transfer.value if forward else f"grad_{transfer.value}",
                    stage=other,
                    microbatch=action.microbatch or 0,
                    shape=type.layout.local_shape(self.sizes),
                    dtype=type.dtype,
                    action=str(action),
                )

    def _reductions(self) -> Iterator[Collective]:
        """One all-reduce for each set of axes, then one for each set of stages that share a weight."""
        together: dict[tuple[tuple[str, ...], tuple[int, ...], str], int] = {}
        holders = self.program.holders()
        for parameter in self.program.parameters:
            stages = holders.get(parameter.name, ())
            if not parameter.trainable or self.stage not in stages:
                continue
            size = math.prod(parameter.type.layout.local_shape(self.sizes))
            shared = stages if len(stages) > 1 else ()
            for key in (*(((parameter.reduce, ()),) if parameter.reduce else ()), *((((), shared),) if shared else ())):
                together[(*key, parameter.type.dtype)] = together.get((*key, parameter.type.dtype), 0) + size
        for (axes, shared, dtype), size in sorted(together.items(), key=lambda item: bool(item[0][1])):
            yield Collective(
                op="all_reduce", axes=axes, stages=shared, shape=(size,), dtype=dtype, action=f"{self.stage}REDUCE_GRAD"
            )

    def _loss(self) -> Iterator[Collective]:
        if any(self.program.loss in call.results for call in self.calls):
            type = self.types[self.program.loss]
            for axis in type.layout.partial:
                if axis in self.program.mesh.names:
                    yield Collective(op="all_reduce", axes=(axis,), shape=(), dtype=type.dtype, action="loss")


def _during(event: Collective, action: Action) -> Collective:
    return replace(event, action=str(action))


def _at(source: Source | None) -> str:
    return f" ({source})" if source is not None and source.line else ""
