"""A step as it is predicted: every operation takes what the roofline says, every rank follows its schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from partc.codegen.collectives import NAMES, comment
from partc.events import Collective, Transfer, events
from partc.mesh import PIPELINE_AXIS
from partc.parts import Kind, Move, Parts
from partc.program import ITEMSIZE, MOVING, Action, Call, Graph, Op, Program, TensorType
from partc.reshard import cost
from partc.roofline import H100, Machine, seconds
from partc.simulate import Durations, Timeline, timeline

# Bytes that AdamW reads and writes for each one of a parameter, its gradient and two moments: 4 and 3 times.
_UPDATE = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of an action: computation, or a collective (`op`) over some axes with what it is for."""

    seconds: float
    op: str = ""
    over: str = ""
    bytes: int = 0  # of a rank's operand
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How many times as long as on the roofline's machine things take."""

    compute: float = 1.0
    communication: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that the ranks at one pipeline coordinate do, in seconds from the step's start."""

    name: str
    start: float
    end: float
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True)
class Forecast:
    """The predicted step of a program on a machine; `places` are coordinates on the pipeline axis."""

    program: Program
    machine: Machine = H100
    scale: Scale = Scale()

    def segments(self, stage: int, kind: str) -> tuple[Segment, ...]:
        """Of one run of a stage's action: F, B, I, W or REDUCE_GRAD."""
        return self._segments[stage, kind]

    def transfer(self, stage: int) -> float:
        """Seconds until what a stage has sent to the next ones has arrived, values or gradients."""
        sizes = [
            self._types[each.value].local_bytes(self.program.sizes)
            for each in self.program.transfers
            if self.program.travels(each) and stage in (each.source, each.target)
        ]
        slow = self.machine.meeting + max(sizes, default=0) / self.machine.link
        return self.scale.communication * slow if sizes else 0.0

    @cached_property
    def timeline(self) -> Timeline:
        def total(stage: int, kind: str) -> float:
            return sum(segment.seconds for segment in self.segments(stage, kind))

        durations = [
            Durations(
                forward=total(stage, "F"),
                backward=total(stage, "B"),
                inputs=total(stage, "I"),
                weights=total(stage, "W"),
                reduction=total(stage, "REDUCE_GRAD"),
                transfer=self.transfer(stage),
            )
            for stage in range(self.program.stages)
        ]
        return timeline(self.program, durations)

    @cached_property
    def places(self) -> tuple[tuple[Span, ...], ...]:
        """What each coordinate does, in order of time."""
        return tuple(tuple(self._place(place)) for place in range(self.program.mesh.axis(PIPELINE_AXIS)))

    @property
    def seconds(self) -> float:
        return max((span.end for place in self.places for span in place), default=0.0)

    def _place(self, place: int) -> Iterator[Span]:
        """Ranks of a pipeline begin together, and wait for nobody after their last action."""
        each = [sum(segment.seconds for segment in self._once(other)) for other in range(len(self.timeline.ranks))]
        begin = max(each)
        if each[place]:
            yield Span(name="prepare", start=0.0, end=each[place], segments=tuple(self._once(place)))
        spans = [
            Span(
                name=str(span.compute),
                start=begin + span.start,
                end=begin + span.end,
                segments=self.segments(span.compute.stage, span.compute.kind),
            )
            for span in self.timeline.ranks[place]
        ]
        spans += [
            Span(
                name=f"{stage}REDUCE_GRAD",
                start=begin + start,
                end=begin + end,
                segments=self.segments(stage, "REDUCE_GRAD"),
            )
            for stage, start, end in self.timeline.reductions[place]
            if end > start
        ]
        yield from sorted(spans, key=lambda span: span.start)
        now = max((span.end for span in spans), default=begin)
        for name, segments in (("the end of the step", self._tail(place)), ("the update", self._update(place))):
            length = sum(segment.seconds for segment in segments)
            if length:
                yield Span(name=name, start=now, end=now + length, segments=tuple(segments))
            now += length

    @cached_property
    def _segments(self) -> dict[tuple[int, str], tuple[Segment, ...]]:
        found = {
            (stage, kind): tuple(self._of_runs(stage, self._runs(stage, kind)))
            for stage in range(self.program.stages)
            for kind in ("F", "B", "I", "W")
        }
        for stage in range(self.program.stages):
            name = str(Action(stage=stage, kind="REDUCE_GRAD"))
            found[stage, "REDUCE_GRAD"] = tuple(self._of_events(self.program.place(stage), {name}, "gradients"))
        return found

    def _runs(self, stage: int, kind: str) -> Iterator[tuple[Call, Graph, Kind]]:
        """The graphs that an action runs, in order."""
        regions = {region.name: region for region in self.program.regions}
        calls = [
            call for call in self.program.calls if call.stage == stage and regions[call.region].phase == "microbatch"
        ]
        steps: list[tuple[Iterable[Call], Literal["forward", "backward", "weight"], Kind]] = []
        if kind == "F":
            steps.append((calls, "forward", "F"))
        if kind in ("B", "I"):
            steps.append((reversed(calls), "backward", "I" if kind == "I" else "B"))
        if kind in ("B", "W"):
            steps.append((calls, "weight", "W"))
        for each, name, run in steps:
            for call in each:
                graph: Graph | None = getattr(regions[call.region], name)
                if graph is not None:
                    yield call, graph, run

    def _of_runs(self, stage: int, runs: Iterable[tuple[Call, Graph, Kind]]) -> Iterator[Segment]:
        for call, graph, kind in runs:
            for move in self._parts.before(call, kind):
                yield self._move(move, f"{call.name} needs its parameters whole")
            for segment in self._of_graph(call.region, graph):
                yield replace(segment, why=f"{call.name}: {segment.why}") if segment.op else segment
            for move in self._parts.after(call, kind):
                yield self._move(move, f"each rank keeps its part of {call.name}'s gradients")

    def _of_graph(self, region: str, graph: Graph) -> Iterator[Segment]:
        """Computations between two collectives are one segment."""
        key = region, id(graph)
        if key not in self._graphs:
            self._graphs[key] = tuple(self._new_graph(region, graph))
        yield from self._graphs[key]

    @cached_property
    def _graphs(self) -> dict[tuple[str, int], tuple[Segment, ...]]:
        return {}

    def _new_graph(self, region: str, graph: Graph) -> Iterator[Segment]:
        sizes = self.program.sizes
        types = {value.name: value.type for value in self.program.region(region).params}
        types.update((name, value.type) for name, value in graph.definitions().items())
        module = next(call.name for call in self.program.calls if call.region == region)

        def label(op: Op) -> str:
            place = op.source.module if op.source else ""
            return place.removeprefix(module).strip(".") or op.name.removesuffix("_backward")

        work = 0.0
        for op in graph.ops:
            axis = dict(op.attrs).get("axis")
            takes = seconds(op, types, sizes, self.machine)
            if op.name not in MOVING or op.name not in NAMES or not isinstance(axis, str):
                work += takes
            elif sizes[axis] > 1:
                if work:
                    yield Segment(seconds=self.scale.compute * work)
                    work = 0.0
                yield Segment(
                    seconds=self.scale.communication * takes,
                    op=op.name,
                    over=axis,
                    bytes=types[next(op.refs())].local_bytes(sizes),
                    why=comment(op, graph, types, sizes, label).partition(": ")[2],
                )
        if work:
            yield Segment(seconds=self.scale.compute * work)

    def _once(self, place: int) -> list[Segment]:
        """What the step decides from its whole batch."""
        regions = {region.name: region for region in self.program.regions}
        return [
            segment
            for call in self.program.calls
            if regions[call.region].phase == "step" and self.program.place(call.stage) == place
            for segment in self._of_graph(call.region, regions[call.region].forward)
        ]

    def _tail(self, place: int) -> list[Segment]:
        return [
            *self._of_events(place, {"shared weights"}, "stages that share weights sum their gradients"),
            *self._of_events(place, {"loss"}, "the loss of the whole batch"),
        ]

    def _update(self, place: int) -> list[Segment]:
        """AdamW is bound by memory; then what every rank keeps whole is gathered."""
        size = sum(
            parameter.type.local_bytes(self.program.sizes)
            for parameter in self.program.parameters
            if parameter.trainable and place in map(self.program.place, self._holders.get(parameter.name, ()))
        )
        work = Segment(seconds=self.scale.compute * (self.machine.start + _UPDATE * size / self.machine.memory))
        return [work, *self._of_events(place, {"update"}, "every rank keeps the updated parameters whole")]

    def _of_events(self, place: int, actions: set[str], why: str) -> list[Segment]:
        return [
            self._collective(event, why)
            for event in self._events[place]
            if isinstance(event, Collective) and event.action in actions
        ]

    def _collective(self, event: Collective, why: str) -> Segment:
        ways = len(event.places) or 1
        for axis in event.axes:
            ways *= self.program.sizes[axis]
        size = ITEMSIZE[event.dtype]
        for length in event.shape:
            size *= length
        return self._moving(event.op, ",".join(event.axes) or f"pp {','.join(map(str, event.places))}", ways, size, why)

    def _move(self, move: Move, why: str) -> Segment:
        size = move.size * ITEMSIZE[move.dtype] // (move.ways if move.op == "all_gather" else 1)
        return self._moving(move.op, ",".join(move.axes), move.ways, size, why)

    def _moving(self, op: str, over: str, ways: int, size: int, why: str) -> Segment:
        takes = self.machine.meeting + cost(op, ways, size) / self.machine.link if ways > 1 else 0.0
        return Segment(seconds=self.scale.communication * takes, op=op, over=over, bytes=size, why=why)

    @cached_property
    def _events(self) -> tuple[tuple[Collective | Transfer, ...], ...]:
        return events(self.program).places

    @cached_property
    def _parts(self) -> Parts:
        return Parts(self.program)

    @cached_property
    def _types(self) -> dict[str, TensorType]:
        return self.program.value_types()

    @cached_property
    def _holders(self) -> dict[str, tuple[int, ...]]:
        return self.program.holders()

    def arrivals(self) -> Iterator[tuple[int, str, str]]:
        """A stage, a computation of it, and one that reads on another rank what that has made."""
        program = self.program
        done = {(action.stage, action.kind, action.microbatch) for row in program.schedule for action in row}
        travelling = (each for each in program.transfers if program.travels(each))
        for source, target, gradient in dict.fromkeys((each.source, each.target, each.gradient) for each in travelling):
            for index in range(program.microbatches):
                yield source, f"{source}F{index}", f"{target}F{index}"
                back = "I" if (target, "I", index) in done else "B"
                front = "I" if (source, "I", index) in done else "B"
                if gradient:
                    yield target, f"{target}{back}{index}", f"{source}{front}{index}"

    def split(self) -> tuple[float, float, float]:
        """Seconds of computation, of waiting for what is on its way, and for a peer: means over the coordinates."""
        transfers: dict[str, float] = {}
        for stage, _, target in self.arrivals():
            transfers[target] = max(transfers.get(target, 0.0), self.transfer(stage))
        compute = exposed = 0.0
        for spans in self.places:
            now = 0.0
            for span in spans:
                compute += sum(segment.seconds for segment in span.segments if not segment.op)
                exposed += sum(segment.seconds for segment in span.segments if segment.op)
                exposed += min(span.start - now, transfers.get(span.name, 0.0))
                now = span.end
        count = len(self.places)
        return compute / count, exposed / count, self.seconds - (compute + exposed) / count

    def scaled(self, scale: Scale) -> Forecast:
        return replace(self, scale=scale)
