"""The predicted step: the roofline gives each operation's duration, and every rank follows its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, takewhile

from partc.communication.descriptions import comment
from partc.communication.exchanges import Collective, Exchanges, graph_of
from partc.communication.execution import Execution, GraphRun, Start, Step, Wait
from partc.cost.action_timeline import ActionTimeline, Segment, TimelineBuilder
from partc.cost.roofline import H100, Machine, seconds
from partc.cost.simulation import Durations, Timeline, timeline
from partc.ir.collectives import cost
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.program import MOVING, Action, Call, Graph, Op, Program, TensorType

# AdamW's traffic in parameters: it reads parameter, gradient and two moments, and writes all but the gradient.
_UPDATE = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Measured durations as multiples of those on the roofline's machine."""

    compute: float = 1.0
    communication: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An action of the ranks at one pipeline coordinate, in seconds from the step's start."""

    name: str
    start: float
    inside: ActionTimeline

    @property
    def end(self) -> float:
        return self.start + self.inside.seconds


@dataclass(frozen=True)
class Forecast:
    """The predicted step of a program on a machine; `places` are coordinates on the pipeline axis."""

    program: Program
    machine: Machine = H100
    scale: Scale = Scale()

    def action(self, stage: int, kind: str, microbatch: int | None = None, *, updates: bool = True) -> ActionTimeline:
        """One run of a stage's action: F, B, I, W or REDUCE_GRAD. Without a `microbatch`, the last of the step.

        Without `updates`, the step only accumulates the gradients of a batch.
        """
        steps = (self._steps if updates else self._accumulating).get((stage, kind, microbatch), ())
        key = id(steps), kind
        if key not in self._actions:
            self._actions[key] = self._played(steps, self._carried(stage) if kind == "REDUCE_GRAD" else 0.0)
        return self._actions[key]

    def _carried(self, stage: int) -> float:
        """Seconds for which collectives started by a stage's last backward continue after it."""
        return max(self.action(stage, kind).carried for kind in ("B", "W"))

    def transfer(self, stage: int) -> float:
        """Seconds until the values or gradients that a stage sends have arrived."""
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
            return self.action(stage, kind).seconds

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
        """The actions of each coordinate, in order of time."""
        return tuple(tuple(self._place(place)) for place in range(self.program.mesh.axis(PIPELINE_AXIS)))

    @property
    def seconds(self) -> float:
        return max((span.end for place in self.places for span in place), default=0.0)

    def _place(self, place: int) -> Iterator[Span]:
        """The actions of a coordinate: all begin together, and wait for no other after their last action."""
        each = [self.once(other) for other in range(len(self.timeline.ranks))]
        begin = max(inside.seconds for inside in each)
        if each[place].seconds:
            yield Span(name="prepare", start=0.0, inside=each[place])
        played = self.timeline.ranks[place]
        spans = [
            Span(
                name=str(span.compute),
                start=begin + span.start,
                inside=self.action(span.compute.stage, span.compute.kind, span.compute.microbatch),
            )
            for span in played
        ]
        spans += [
            Span(name=f"{stage}REDUCE_GRAD", start=begin + start, inside=self.action(stage, "REDUCE_GRAD"))
            for stage, start, end in self.timeline.reductions[place]
            if end > start
        ]
        yield from sorted(spans, key=lambda span: span.start)
        now = max((span.end for span in spans), default=begin)
        for name, inside in (("the end of the step", self._tail(place)), ("the update", self._update(place))):
            if inside.seconds:
                yield Span(name=name, start=now, inside=inside)
            now += inside.seconds

    @cached_property
    def _actions(self) -> dict[tuple[int, str], ActionTimeline]:
        return {}

    @cached_property
    def _executions(self) -> tuple[tuple[tuple[Action | str, tuple[Step, ...]], ...], ...]:
        """The execution of a step at each pipeline coordinate."""
        exchanges = Exchanges(self.program)
        places = range(self.program.mesh.axis(PIPELINE_AXIS))
        return tuple(tuple(Execution(self.program, place, exchanges).step()) for place in places)

    @cached_property
    def _steps(self) -> dict[tuple[int, str, int | None], tuple[Step, ...]]:
        """Steps by stage, kind and microbatch; None stands for the last microbatch."""
        return _by_action(self._executions)

    @cached_property
    def _accumulating(self) -> dict[tuple[int, str, int | None], tuple[Step, ...]]:
        """The same for a batch that is not followed by an update."""
        places = range(self.program.mesh.axis(PIPELINE_AXIS))
        return _by_action([Execution(self.program, place).step(updates=False) for place in places])

    def _around(self, place: int, *names: str) -> tuple[Step, ...]:
        """The steps of a coordinate outside the actions of its stages."""
        around = (
            steps
            for action, steps in self._executions[place]
            if (action if isinstance(action, str) else action.kind) in names
        )
        return tuple(chain.from_iterable(around))

    def _played(self, steps: Iterable[Step], begin: float = 0.0) -> ActionTimeline:
        """Lay out steps in order. A wait for a collective that an earlier action has started takes no time."""
        builder = TimelineBuilder()
        builder.now = begin
        for step in steps:
            match step:
                case Start():
                    builder.start(step.key, self._collective(step.collective, step.why))
                case Wait():
                    builder.wait(step.key)
                case GraphRun():
                    graph = graph_of(self.program.region(step.call.region), step.kind)
                    if graph is not None:
                        self._run(builder, step.call, graph)
        return builder.built()

    def _run(self, builder: TimelineBuilder, call: Call, graph: Graph) -> None:
        """Lay out a call's operations; the call's name makes the keys of their collectives unique."""
        for name, segment, awaited in self._of_graph(call.region, graph):
            if awaited:
                builder.wait((call.name, awaited))
            elif segment.op:
                builder.start((call.name, name), replace(segment, why=f"{call.name}: {segment.why}"))
            else:
                builder.work(segment.seconds)

    def _of_graph(self, region: str, graph: Graph) -> tuple[tuple[str, Segment, str], ...]:
        """Yields (started result, segment, awaited result); computations between two collectives are one segment."""
        key = region, id(graph)
        if key not in self._graphs:
            self._graphs[key] = tuple(self._new_graph(region, graph))
        return self._graphs[key]

    @cached_property
    def _graphs(self) -> dict[tuple[str, int], tuple[tuple[str, Segment, str], ...]]:
        return {}

    def _new_graph(self, region: str, graph: Graph) -> Iterator[tuple[str, Segment, str]]:
        sizes = self.program.sizes
        types = self.program.region(region).types(graph)
        module = next(call.name for call in self.program.calls if call.region == region)
        awaited = {next(op.refs()) for op in graph.ops if op.name == "wait"}
        nothing = Segment(seconds=0.0)

        def label(op: Op) -> str:
            place = op.source.module if op.source else ""
            return place.removeprefix(module).strip(".") or op.name.removesuffix("_backward")

        work = 0.0
        for op in graph.ops:
            axis = dict(op.attrs).get("axis")
            takes = seconds(op, types, sizes, self.machine)
            moves = op.name in MOVING and isinstance(axis, str)
            if (not moves and op.name != "wait") or (isinstance(axis, str) and sizes[axis] == 1):
                work += takes
                continue
            if work:
                yield "", Segment(seconds=self.scale.compute * work), ""
                work = 0.0
            if op.name == "wait":
                yield "", nothing, next(op.refs())
                continue
            made = op.results[0].name
            segment = Segment(
                seconds=self.scale.communication * takes,
                op=op.name,
                over=str(axis),
                bytes=types[next(op.refs())].local_bytes(sizes),
                why=comment(op, graph, types, sizes, label).partition(": ")[2],
            )
            yield made, segment, ""
            if made not in awaited:
                yield "", nothing, made
        if work:
            yield "", Segment(seconds=self.scale.compute * work), ""

    def once(self, place: int) -> ActionTimeline:
        """The calls of phase `step`, while the first parameters are gathered."""
        opening = takewhile(lambda item: item[0] != "prepare", self._executions[place])
        gathers = chain.from_iterable(steps for _, steps in opening)
        return self._played((*gathers, *self._around(place, "prepare")))

    def _tail(self, place: int) -> ActionTimeline:
        return self._played(self._around(place, "end"))

    def _update(self, place: int) -> ActionTimeline:
        """AdamW, whose time is that of its memory traffic; then the gathers of parameters that ranks keep whole."""
        size = sum(
            parameter.type.local_bytes(self.program.sizes)
            for parameter in self.program.parameters
            if parameter.trainable and place in map(self.program.place, self._holders.get(parameter.name, ()))
        )
        builder = TimelineBuilder()
        builder.work(self.scale.compute * (self.machine.start + _UPDATE * size / self.machine.memory))
        gathers = self._played(self._around(place, "update"), builder.now)
        return replace(gathers, pieces=(*builder.pieces, *gathers.pieces))

    def _collective(self, collective: Collective, why: str) -> Segment:
        over = ",".join(collective.axes) or f"pp {','.join(map(str, collective.places))}"
        return self._moving(collective.op, over, collective.ways(self.program.sizes), collective.bytes, why)

    def collective(self, op: str, over: str, size: int) -> float:
        """Seconds of a collective on `size` bytes of each rank, over axes ("dp,tp") or pipeline ranks ("pp 0,2")."""
        axes, _, ranks = over.partition(" ")
        ways = len(ranks.split(",")) if ranks else self._ways(axes.split(","))
        return self._moving(op, over, ways, size, "").seconds

    def _ways(self, axes: Iterable[str]) -> int:
        return math.prod(self.program.sizes[axis] for axis in axes)

    def _moving(self, op: str, over: str, ways: int, size: int, why: str) -> Segment:
        takes = self.machine.meeting + cost(op, ways, size) / self.machine.link if ways > 1 else 0.0
        return Segment(seconds=self.scale.communication * takes, op=op, over=over, bytes=size, why=why)

    @cached_property
    def _types(self) -> Mapping[str, TensorType]:
        return self.program.value_types()

    @cached_property
    def _holders(self) -> Mapping[str, tuple[int, ...]]:
        return self.program.holders()

    def arrivals(self) -> Iterator[tuple[int, str, str]]:
        """Yields (stage, producer, consumer) for every value that crosses ranks."""
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
        """Seconds of computation, of waits for communication, and of waits for a peer: means over coordinates."""
        transfers: dict[str, float] = {}
        for stage, _, target in self.arrivals():
            transfers[target] = max(transfers.get(target, 0.0), self.transfer(stage))
        compute = exposed = 0.0
        for spans in self.places:
            now = 0.0
            for span in spans:
                compute += span.inside.compute
                exposed += span.inside.seconds - span.inside.compute
                exposed += min(span.start - now, transfers.get(span.name, 0.0))
                now = span.end
        count = len(self.places)
        return compute / count, exposed / count, self.seconds - (compute + exposed) / count

    def scaled(self, scale: Scale) -> Forecast:
        return replace(self, scale=scale)


def _by_action(
    executions: Iterable[Iterable[tuple[Action | str, tuple[Step, ...]]]],
) -> dict[tuple[int, str, int | None], tuple[Step, ...]]:
    found: dict[tuple[int, str, int | None], tuple[Step, ...]] = {}
    for action, steps in chain.from_iterable(executions):
        if isinstance(action, Action) and action.kind != "UNSHARD":
            found[action.stage, action.kind, action.microbatch] = steps
            found[action.stage, action.kind, None] = steps
    return found
