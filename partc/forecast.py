"""A step as it is predicted: every operation takes what the roofline says, every rank follows its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from partc.codegen.collectives import comment
from partc.events import Collective, Transfer, events
from partc.laid import Laid, Layout, Segment
from partc.mesh import PIPELINE_AXIS
from partc.parts import Move, Parts, graph_of
from partc.program import ITEMSIZE, MOVING, Action, Call, Graph, Op, Program, TensorType
from partc.reductions import Bucket, Reductions, Sum
from partc.reshard import cost
from partc.roofline import H100, Machine, seconds
from partc.simulate import Durations, Timeline, timeline
from partc.turns import Around, Course, Scatters, Turn, Turns

# Bytes that AdamW reads and writes for each one of a parameter, its gradient and two moments: 4 and 3 times.
_UPDATE = 7


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
    laid: Laid

    @property
    def end(self) -> float:
        return self.start + self.laid.seconds


@dataclass(frozen=True)
class Forecast:
    """The predicted step of a program on a machine; `places` are coordinates on the pipeline axis."""

    program: Program
    machine: Machine = H100
    scale: Scale = Scale()

    def laid(self, stage: int, kind: str, microbatch: int | None = None, *, last: bool = False) -> Laid:
        """One run of a stage's action: F, B, I, W or REDUCE_GRAD; with `last`, the backward before the update.

        Without a `microbatch`, the last of the step.
        """
        around = self._around.get((stage, kind, microbatch), ())
        key = stage, kind, around, last
        if key not in self._laid:
            self._laid[key] = (
                self._reduction(stage) if kind == "REDUCE_GRAD" else self._action(stage, around, last=last)
            )
        return self._laid[key]

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
            return self.laid(stage, kind).seconds

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
        each = [self.once(other) for other in range(len(self.timeline.ranks))]
        begin = max(laid.seconds for laid in each)
        if each[place].seconds:
            yield Span(name="prepare", start=0.0, laid=each[place])
        played = self.timeline.ranks[place]
        final = {span.compute.stage: span for span in played if span.compute.kind in ("B", "W")}
        spans = [
            Span(
                name=str(span.compute),
                start=begin + span.start,
                laid=self.laid(
                    span.compute.stage,
                    span.compute.kind,
                    span.compute.microbatch,
                    last=final.get(span.compute.stage) == span,
                ),
            )
            for span in played
        ]
        spans += [
            Span(name=f"{stage}REDUCE_GRAD", start=begin + start, laid=self.laid(stage, "REDUCE_GRAD"))
            for stage, start, end in self.timeline.reductions[place]
            if end > start
        ]
        yield from sorted(spans, key=lambda span: span.start)
        now = max((span.end for span in spans), default=begin)
        for name, laid in (("the end of the step", self._tail(place)), ("the update", self._update(place))):
            if laid.seconds:
                yield Span(name=name, start=now, laid=laid)
            now += laid.seconds

    @cached_property
    def _laid(self) -> dict[tuple[int, str, tuple[Around, ...], bool], Laid]:
        return {}

    @cached_property
    def _courses(self) -> tuple[Course, ...]:
        return tuple(map(Turns(self.program).course, range(self.program.mesh.axis(PIPELINE_AXIS))))

    @cached_property
    def _around(self) -> dict[tuple[int, str, int | None], tuple[Around, ...]]:
        """By stage, kind and microbatch; with None the last of a kind. What was started before is there."""
        found: dict[tuple[int, str, int | None], tuple[Around, ...]] = {}
        for action, around in (item for course in self._courses for item in course.actions.items()):
            found[action.stage, action.kind, action.microbatch] = around
            found[action.stage, action.kind, None] = around
        return found

    def _action(self, stage: int, around: tuple[Around, ...], *, last: bool) -> Laid:
        regions = {region.name: region for region in self.program.regions}
        layout, scatters = Layout(), Scatters()
        inside: list[tuple[object, list[Segment]]] = []
        for each in around:
            graph = graph_of(regions[each.call.region], each.kind)
            self._turns(layout, each.before)
            if graph is not None:
                self._run(layout, each.call, graph)
            self._turns(layout, each.after)
            if last and each.kind == self._parts.completing and graph is not None:
                self._turns(layout, scatters.go_on())
                for key, levels in inside:  # what was summed inside nodes goes on between them
                    layout.wait(key)
                    layout.start((key, 1), levels[1])
                inside = []
                for moves, why in self._scattered(stage, each.call.name):
                    self._turns(layout, scatters.scatter(moves, why))
                for index, levels in enumerate(self._summed(stage, each.call.name)):
                    layout.start((each.call.name, index), levels[0])
                    if len(levels) > 2:
                        inside.append(((each.call.name, index), levels))
        return layout.laid()

    def _turns(self, layout: Layout, turns: Iterable[Turn]) -> None:
        for turn in turns:
            if turn.move is None:
                layout.wait(turn.key)
            else:
                layout.start(turn.key, self._move(turn.move, turn.why))

    def _reduction(self, stage: int) -> Laid:
        """What the last backward has started ends first; then what starts at the step's end."""
        layout = Layout()
        layout.now = max(self.laid(stage, kind, last=True).carried for kind in ("B", "W"))
        name = str(Action(stage=stage, kind="REDUCE_GRAD"))
        layout.whole(self._of_events(self.program.place(stage), {name}, "gradients are summed"))
        return layout.laid()

    def _buckets(self, stage: int, call: str) -> Iterator[tuple[Bucket, str]]:
        """What starts to be summed after the last backward of a call, and why."""
        for bucket in self._reductions[stage].buckets:
            if bucket.after == call:
                yield bucket, f"gradients that are complete after {call}"

    def _scattered(self, stage: int, call: str) -> Iterator[tuple[Iterator[Move], str]]:
        for bucket, why in self._buckets(stage, call):
            if bucket.scattered:
                yield self._parts.scattered_sums(bucket.parameters), why

    def _summed(self, stage: int, call: str) -> Iterator[list[Segment]]:
        """What each sum consists of, one after the other."""
        reductions = self._reductions[stage]
        for bucket, why in self._buckets(stage, call):
            for dtype, size in reductions.pieces(bucket.parameters) if not bucket.scattered else ():
                yield [self._level(level, why) for level in reductions.sums(dtype, size, bucket.over)]

    @cached_property
    def _reductions(self) -> tuple[Reductions, ...]:
        return tuple(Reductions(self.program, stage) for stage in range(self.program.stages))

    def _level(self, part: Sum, why: str) -> Segment:
        size = part.size * ITEMSIZE[part.dtype]
        return self._moving(part.op, ",".join(part.axes), self._ways(part.axes), size, why)

    def _run(self, layout: Layout, call: Call, graph: Graph) -> None:
        """A call's operations; the names of their results are the call's own."""
        for name, segment, awaited in self._of_graph(call.region, graph):
            if awaited:
                layout.wait((call.name, awaited))
            elif segment.op:
                layout.start((call.name, name), replace(segment, why=f"{call.name}: {segment.why}"))
            else:
                layout.work(segment.seconds)

    def _of_graph(self, region: str, graph: Graph) -> tuple[tuple[str, Segment, str], ...]:
        """Result, segment, and what is waited for instead; computations between two collectives are one segment."""
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

    def once(self, place: int) -> Laid:
        """What the step decides from its whole batch, while what is read first is gathered."""
        regions = {region.name: region for region in self.program.regions}
        layout = Layout()
        self._turns(layout, self._courses[place].opening)
        for call in self.program.calls:
            if regions[call.region].phase == "step" and self.program.place(call.stage) == place:
                self._run(layout, call, regions[call.region].forward)
        return layout.laid()

    def _tail(self, place: int) -> Laid:
        layout = Layout()
        layout.whole(self._of_events(place, {"shared weights"}, "stages that share weights sum their gradients"))
        layout.whole(self._of_events(place, {"loss"}, "the loss of the whole batch"))
        return layout.laid()

    def _update(self, place: int) -> Laid:
        """AdamW is bound by memory; then what every rank keeps whole is gathered."""
        size = sum(
            parameter.type.local_bytes(self.program.sizes)
            for parameter in self.program.parameters
            if parameter.trainable and place in map(self.program.place, self._holders.get(parameter.name, ()))
        )
        layout = Layout()
        layout.work(self.scale.compute * (self.machine.start + _UPDATE * size / self.machine.memory))
        layout.whole(self._of_events(place, {"update"}, "every rank keeps the updated parameters whole"))
        return layout.laid()

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

    def collective(self, op: str, over: str, size: int) -> float:
        """Seconds of one, of `size` bytes of each rank, over axes ("dp,tp") or pipeline ranks ("pp 0,2")."""
        axes, _, ranks = over.partition(" ")
        ways = len(ranks.split(",")) if ranks else self._ways(axes.split(","))
        return self._moving(op, over, ways, size, "").seconds

    def _ways(self, axes: Iterable[str]) -> int:
        return math.prod(self.program.sizes[axis] for axis in axes)

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
                compute += span.laid.compute
                exposed += span.laid.seconds - span.laid.compute
                exposed += min(span.start - now, transfers.get(span.name, 0.0))
                now = span.end
        count = len(self.places)
        return compute / count, exposed / count, self.seconds - (compute + exposed) / count

    def scaled(self, scale: Scale) -> Forecast:
        return replace(self, scale=scale)
