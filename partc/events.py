"""What every rank communicates in a step, in order: the events that a finished program leads to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from partc.errors import InternalError, Source
from partc.layout import Sizes
from partc.mesh import PIPELINE_AXIS, Mesh
from partc.parts import Parts, graph_of
from partc.program import MOVING, Action, Graph, Program, Region, Value
from partc.reductions import Reductions, Sum
from partc.turns import Around, Turn, Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """An operation that every rank of a group enters together.

    The group is the ranks that differ on `axes`; with `stages`, the ranks at those pipeline
    coordinates (`places`) that agree on every other axis.
    """

    op: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    attrs: tuple[tuple[str, object], ...] = ()
    places: tuple[int, ...] = ()
    action: str = ""
    source: Source | None = None

    @property
    def content(self) -> tuple[object, ...]:
        """What all ranks must agree on."""
        return self.op, self.shape, self.dtype, self.attrs

    def __str__(self) -> str:
        where = f"pipeline ranks {self.places}" if self.places else " and ".join(self.axes)
        return f"{self.action}: {self.op} of {self.dtype}{list(self.shape)} over {where}{_at(self.source)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A send or the post of a receive, neither of which waits; or the wait for what was posted.

    Every `link`, from one stage to another, is a channel of its own: what is posted first gets what is
    sent first.
    """

    kind: Literal["send", "recv", "wait"]
    value: str
    link: tuple[int, int]
    place: int  # the pipeline coordinate of the other rank, which agrees on every other axis
    microbatch: int
    shape: tuple[int, ...]
    dtype: str
    action: str = ""

    @property
    def content(self) -> tuple[object, ...]:
        """What both ends must agree on."""
        return self.value, self.microbatch, self.shape, self.dtype

    def __str__(self) -> str:
        way = f"to stage {self.link[1]}" if self.kind == "send" else f"from stage {self.link[0]}"
        return f"{self.action}: {self.kind} of {self.value} {self.dtype}{list(self.shape)} {way}"


Event = Collective | Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationPlan:
    """Every rank's events: those of its pipeline coordinate, unless `overrides` gives the rank its own."""

    mesh: Mesh
    places: tuple[tuple[Event, ...], ...]
    overrides: Mapping[int, tuple[Event, ...]] = field(default_factory=dict)

    def of(self, rank: int) -> tuple[Event, ...]:
        found = self.overrides.get(rank)
        return self.places[self.mesh.coordinate(rank).get(PIPELINE_AXIS, 0)] if found is None else found


def events(program: Program) -> CommunicationPlan:
    """The communication of one step, set-up included, as the emitted package does it."""
    count = program.mesh.axis(PIPELINE_AXIS)
    return CommunicationPlan(mesh=program.mesh, places=tuple(tuple(_Place(program, p).run()) for p in range(count)))


class _Place:
    """Collects the events of one pipeline coordinate, whose rank runs one stage or several."""

    def __init__(self, program: Program, place: int) -> None:
        self.program = program
        self.place = place
        self.stages = program.stages_at(place)
        self.sizes: Sizes = program.sizes
        self.regions = {region.name: region for region in program.regions}
        self.types = program.value_types()
        self.owners = program.owners()
        self.reductions = {stage: Reductions(program, stage) for stage in self.stages}
        self.parts = Parts(program)
        self.turns = Turns(program)
        self.course = self.turns.course(place)
        self.begun: set[tuple[int, str]] = set()
        # Of sums that have been started, whether they are inside nodes, and what is to come.
        self.going: dict[int, list[tuple[bool, tuple[Sum, ...]]]] = {}

    def run(self) -> Iterator[Event]:
        for stage in self.stages:
            yield from _moved(self.turns.kept(stage), "start")
        for phase in ("setup", "step"):
            yield from _moved(self.course.opening if phase == "step" else (), "prepare")
            for stage in self.stages:
                yield from self._of_phase(stage, phase)
        blocks: dict[tuple[int, tuple[Around, ...], bool], tuple[Collective, ...]] = {}
        last = {action.stage: action for action in self.program.schedule[self.place] if action.kind in ("B", "W")}
        waits: dict[tuple[int, bool, int | None], list[Transfer]] = {}
        for action in self.program.schedule[self.place]:
            if action.kind in ("F", "B", "I", "W"):
                yield from waits.pop((action.stage, action.kind == "F", action.microbatch), ())
                around = self.course.actions[action]
                key = (action.stage, around, action == last.get(action.stage))
                if key not in blocks:
                    blocks[key] = tuple(self._compute(*key))
                yield from (_during(event, action) for event in blocks[key])
            elif action.kind == "REDUCE_GRAD":
                yield from (_during(event, action) for event in self._reductions(action.stage))
            else:
                transfers = tuple(self._transfers(action))
                yield from transfers
                if action.kind in ("RECV_F", "RECV_B"):
                    reader = (action.stage, action.kind == "RECV_F", action.microbatch)
                    waits[reader] = [replace(transfer, kind="wait") for transfer in transfers]
        for stage, reductions in self.reductions.items():
            for bucket in reductions.buckets:
                if (stage, bucket.after) not in self.begun:
                    raise InternalError(
                        f"stage {stage} never sums its gradients that are complete after {bucket.after}"
                    )
        yield from self._shared()
        yield from self._loss()
        for stage in self.stages:
            yield from _moved(self.turns.refreshed(stage), "update")

    def _of_phase(self, stage: int, phase: str) -> Iterator[Collective]:
        for call in self.program.calls:
            region = self.regions[call.region]
            if call.stage == stage and region.phase == phase:
                yield from self._collectives(region, region.forward, phase)

    def _compute(self, stage: int, around: tuple[Around, ...], last: bool) -> Iterator[Collective]:
        for each in around:
            region = self.regions[each.call.region]
            graph = graph_of(region, each.kind)
            yield from _moved(each.before, each.kind)
            yield from self._collectives(region, graph, each.kind)
            yield from _moved(each.after, each.kind)
            if last and each.kind == self.parts.completing and graph is not None:
                yield from self._buckets(stage, each.call.name)

    def _collectives(self, region: Region, graph: Graph | None, action: str) -> Iterator[Collective]:
        if graph is None:
            return
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
        found = [
            transfer
            for transfer in filter(self.program.travels, self.program.transfers)
            if action.stage == (transfer.source if leaving else transfer.target) and (forward or transfer.gradient)
        ]
        if leaving:  # a stage sends a value to all its readers, and receives all its gradients, before the next
            names = list(dict.fromkeys(transfer.value for transfer in found))
            found.sort(key=lambda transfer: names.index(transfer.value))
        for transfer in found:
            mine, other = (transfer.source, transfer.target) if leaving else (transfer.target, transfer.source)
            type = self.types[transfer.value]
            yield Transfer(
                kind="send" if send else "recv",
                value=transfer.value if forward else f"grad_{transfer.value}",
                link=(mine, other) if send else (other, mine),
                place=self.program.place(other),
                microbatch=action.microbatch or 0,
                shape=type.layout.local_shape(self.sizes),
                dtype=type.dtype,
                action=str(action),
            )

    def _reductions(self, stage: int) -> Iterator[Collective]:
        """What is left of the sums that have been started, then those that haven't."""
        yield from self._rest(stage)
        yield from self._buckets(stage, "")
        yield from self._rest(stage)

    def _rest(self, stage: int) -> Iterator[Collective]:
        yield from _moved(self.course.left[stage].settle(), "")
        for _, sums in self.going.pop(stage, []):
            yield from map(_collective, sums)

    def _buckets(self, stage: int, after: str) -> Iterator[Collective]:
        """The sums that start after a call's last backward; those inside nodes go on to what lies between."""
        reductions, going = self.reductions[stage], self.going.setdefault(stage, [])
        self.begun.add((stage, after))
        scatters = self.course.left[stage]
        early = any(bucket.after for bucket in reductions.buckets)
        yield from _moved(scatters.go_on() if after and early else (), after)
        for index, (inside, sums) in enumerate(going):
            if inside and after:
                yield _collective(sums[0])
                going[index] = False, sums[1:]
        for bucket in reductions.buckets:
            if bucket.after != after:
                continue
            if bucket.scattered:
                yield from _moved(scatters.scatter(self.parts.scattered_sums(bucket.parameters), ""), after)
                if not after:
                    yield from _moved(scatters.settle(), after)
                continue
            for dtype, size in reductions.pieces(bucket.parameters):
                first, *others = reductions.sums(dtype, size, bucket.over)
                yield _collective(first)
                going.append((all(reductions.levels(bucket.over)), tuple(others)))

    def _shared(self) -> Iterator[Collective]:
        """An all-reduce for each weight that pipeline coordinates share: their gradients lie apart."""
        together: dict[tuple[tuple[int, ...], str], Collective] = {}
        for parameter in self.program.parameters:
            places = tuple(sorted(map(self.program.place, self.owners.get(parameter.name, ()))))
            if parameter.trainable and len(places) > 1 and self.place in places:
                together[places, parameter.name] = Collective(
                    op="all_reduce",
                    axes=(),
                    places=places,
                    shape=(parameter.type.local_elements(self.sizes),),
                    dtype=parameter.type.dtype,
                    action="shared weights",
                )
        for key in sorted(together):
            yield together[key]

    def _loss(self) -> Iterator[Collective]:
        if any(self.program.loss in call.results and call.stage in self.stages for call in self.program.calls):
            type = self.types[self.program.loss]
            for axis in type.layout.partial:
                if axis in self.program.mesh.names:
                    yield Collective(op="all_reduce", axes=(axis,), shape=(), dtype=type.dtype, action="loss")


def _moved(turns: Iterable[Turn], action: str) -> Iterator[Collective]:
    for move in (turn.move for turn in turns if turn.move is not None):
        size = move.size // move.ways if move.op == "all_gather" else move.size
        yield Collective(op=move.op, axes=move.axes, shape=(size,), dtype=move.dtype, action=action)


def _collective(sum: Sum) -> Collective:
    return Collective(op=sum.op, axes=sum.axes, shape=(sum.size,), dtype=sum.dtype)


def _during(event: Collective, action: Action) -> Collective:
    return replace(event, action=str(action))


def _at(source: Source | None) -> str:
    return f" ({source})" if source is not None and source.line else ""
