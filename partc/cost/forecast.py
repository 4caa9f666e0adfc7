"""The predicted step: rates give the duration of each operation and collective, and each rank follows its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, takewhile

from partc.communication.descriptions import purpose, reason
from partc.communication.exchanges import graph_of
from partc.communication.execution import Execution, StatementRun
from partc.cost.action_timeline import ActionTimeline, LeftCollective, Segment, TimelineBuilder
from partc.cost.cores import ROUNDS, BusySpan, pace, paces
from partc.cost.local_costs import LocalCosts
from partc.cost.pieces import OpPiece, in_pieces
from partc.cost.rates import ROOFLINE, Rates
from partc.cost.simulation import Timeline, timeline
from partc.ir.collectives import MOVING, ROUTED, collectives_of, num_blocks
from partc.ir.gradients import touched_rows
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.operations import VIEWS, effects
from partc.ir.program import (
    Action,
    Call,
    Collective,
    Graph,
    GraphKind,
    Op,
    Parameter,
    Program,
    Region,
    TensorType,
)  # fmt: skip
from partc.schedules import Compute
from partc.sharding.choices import weight_axes

# The time to issue a collective, in operations: torch.distributed checks it, and orders streams by events.
_ISSUES = 3
# AdamW's traffic in parameters: it reads parameter, gradient and two moments, and writes all but the gradient.
UPDATE = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Measured durations, as multiples of the durations that the rates give."""

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
    """The predicted step of a program on some hardware; `places` are coordinates on the pipeline axis.

    Forecasts with the same rates may share `costs`.
    """

    program: Program
    rates: Rates = ROOFLINE
    scale: Scale = Scale()
    costs: LocalCosts = field(default_factory=LocalCosts, compare=False)

    def action(self, stage: int, kind: str, microbatch: int | None = None, *, updates: bool = True) -> ActionTimeline:
        """One run of a stage's action: F, B, I, W or REDUCE_GRAD. Without a `microbatch`, the last of the step.

        Without `updates`, the step only accumulates the gradients of a batch.
        """
        steps = (self._steps if updates else self._accumulating).get((stage, kind, microbatch), ())
        key = id(steps), kind
        if key not in self._actions:
            self._actions[key] = self._played(steps)
        return self._actions[key]

    def call(self, call: Call, kind: GraphKind) -> ActionTimeline:
        """The timeline of one run of a call's graph, without the exchanges around it."""
        graph = graph_of(self.program.region(call.region), kind)
        builder = TimelineBuilder(self.rates.slowdown)
        if graph is not None:
            self._run(builder, call, graph)
        return builder.built()

    def transfer(self, stage: int) -> float:
        """Seconds until the values or gradients that a stage sends have arrived."""
        return max((takes for stages, takes in self._transfers.items() if stage in stages), default=0.0)

    @cached_property
    def _transfers(self) -> dict[tuple[int, int], float]:
        """The seconds in which the largest value travels from one stage to another, and in which its gradient
        returns.
        """
        found: dict[tuple[int, int], float] = {}
        program = self.program
        for each in program.sent:
            size = self._types[each.value].local_bytes(program.sizes)
            for stages, kinds in (((each.source, each.target), "F"), ((each.target, each.source), "BI")):
                places = program.place(stages[0]), program.place(stages[1])
                takes = self.scale.communication * self.rates.transfer(program.mesh, places, size)
                if lag := self.rates.lag(program.mesh, (PIPELINE_AXIS,), places):
                    takes += lag * math.sqrt(max(self.action(stages[0], kind).compute for kind in kinds))
                found[stages] = max(found.get(stages, 0.0), takes)
        return found

    @cached_property
    def timeline(self) -> Timeline:
        return self._step[0]

    @cached_property
    def _step(self) -> tuple[Timeline, Mapping[tuple[int, str], ActionTimeline]]:
        """The timeline of the schedule, and each action by its rank and name."""
        places = self.program.mesh.axis(PIPELINE_AXIS)
        ranks = self.program.mesh.size // places
        known: dict[tuple[int, str], float] = {}
        done, found = self._step_at(known)
        # Waiting ranks leave their cores to others. This makes those quicker, which shifts the waits in turn.
        for _ in range(ROUNDS if self._pace > 1 and places > 1 else 0):
            spans = {
                (place, str(span.compute)): BusySpan(
                    place=place,
                    start=span.start,
                    end=span.end,
                    share=found[place, str(span.compute)].compute / max(1e-12, span.end - span.start),
                )
                for place, row in enumerate(done.ranks)
                for span in row
            }
            now = paces(spans, ranks, self.rates.cores)
            known = {name: (known.get(name, self._pace) + value) / 2 for name, value in now.items()}
            done, found = self._step_at(known)
        return done, found

    @cached_property
    def _pace(self) -> float:
        """The pace of computation while all ranks compute."""
        return pace(self.program.mesh.size, self.rates.cores)

    def _step_at(
        self, known: Mapping[tuple[int, str], float]
    ) -> tuple[Timeline, Mapping[tuple[int, str], ActionTimeline]]:
        """The timeline of the schedule, and each action by its rank and name, for given paces of the actions.

        A collective continues from the action that starts it to the action that waits for it, also while the rank
        waits.
        """
        places = range(self.program.mesh.axis(PIPELINE_AXIS))
        before = list(self._opening)
        ended = [0.0 for _ in places]
        found: dict[tuple[int, str], ActionTimeline] = {}

        def play(rank: int, action: Action | Compute, start: float) -> float:
            assert isinstance(action, Action)
            steps = self._steps.get((action.stage, action.kind, action.microbatch), ())
            idle = start - ended[rank] if before[rank].pending else 0.0
            inside = self._continued(steps, before[rank].pending, idle, known.get((rank, action.name), self._pace))
            before[rank] = found[rank, action.name] = inside
            ended[rank] = start + inside.seconds
            return inside.seconds

        done = timeline(self.program, play=play, transfers=self._transfers)
        return done, found

    def _continued(
        self, steps: Sequence[StatementRun], pending: tuple[LeftCollective, ...], idle: float, pace: float
    ) -> ActionTimeline:
        """The timeline of an action's steps after the `pending` collectives. Equal circumstances are laid out once."""
        key = id(steps), tuple((each.key, round(each.left, 9)) for each in pending), round(idle, 9), pace
        if key not in self._known_timelines:
            self._known_timelines[key] = self._played(steps, pending=pending, idle=idle, pace=pace)
        return self._known_timelines[key]

    @cached_property
    def _known_timelines(self) -> dict[tuple[object, ...], ActionTimeline]:
        return {}

    @cached_property
    def places(self) -> tuple[tuple[Span, ...], ...]:
        """The actions of each coordinate, in order of time."""
        return tuple(tuple(self._place(place)) for place in range(self.program.mesh.axis(PIPELINE_AXIS)))

    @property
    def seconds(self) -> float:
        return max((span.end for place in self.places for span in place), default=0.0)

    def _place(self, place: int) -> Iterator[Span]:
        """The actions of a coordinate. All coordinates begin together, and none waits for another after its last
        action.
        """
        begin = max(inside.seconds for inside in self._opening)
        if self._opening[place].pieces:
            yield Span(name="prepare", start=0.0, inside=self._opening[place])
        done, found = self._step
        spans = [
            Span(name=str(span.compute), start=begin + span.start, inside=found[place, str(span.compute)])
            for span in done.ranks[place]
        ]
        spans += [
            Span(name=f"{stage}REDUCE_GRAD", start=begin + start, inside=found[place, f"{stage}REDUCE_GRAD"])
            for stage, start, end in done.reductions[place]
            if end > start
        ]
        yield from sorted(spans, key=lambda span: span.start)
        now = max((span.end for span in spans), default=begin)
        for name, played in (("the end of the step", self._tail(place)), ("the update", self._update(place))):
            if played.seconds:
                yield Span(name=name, start=now, inside=played)
            now += played.seconds

    @cached_property
    def _opening(self) -> tuple[ActionTimeline, ...]:
        """The time of each coordinate before its first action."""
        return tuple(map(self.once, range(self.program.mesh.axis(PIPELINE_AXIS))))

    @cached_property
    def _actions(self) -> dict[tuple[int, str], ActionTimeline]:
        return {}

    @cached_property
    def _executions(self) -> tuple[tuple[tuple[Action | str, tuple[StatementRun, ...]], ...], ...]:
        """The execution of a step at each pipeline coordinate."""
        places = range(self.program.mesh.axis(PIPELINE_AXIS))
        return tuple(tuple(Execution(self.program, place).step()) for place in places)

    @cached_property
    def _steps(self) -> dict[tuple[int, str, int | None], tuple[StatementRun, ...]]:
        """Steps by stage, kind and microbatch; None stands for the last microbatch."""
        return _by_action(self._executions)

    @cached_property
    def _accumulating(self) -> dict[tuple[int, str, int | None], tuple[StatementRun, ...]]:
        """Steps by stage, kind and microbatch, for a batch that no update follows."""
        places = range(self.program.mesh.axis(PIPELINE_AXIS))
        return _by_action([Execution(self.program, place).step(updates=False) for place in places])

    @cached_property
    def _surrounding_steps(self) -> tuple[Mapping[str, tuple[StatementRun, ...]], ...]:
        """For each coordinate, the steps outside the actions of its stages, by their names."""
        return tuple(
            {action: steps for action, steps in execution if isinstance(action, str)} for execution in self._executions
        )

    def _played(
        self,
        steps: Iterable[StatementRun],
        pending: tuple[LeftCollective, ...] = (),
        idle: float = 0.0,
        pace: float | None = None,
    ) -> ActionTimeline:
        """The timeline of steps in order, after the pending collectives. A wait for any other collective takes no
        time.
        """
        builder = TimelineBuilder(self.rates.slowdown, pending, idle, self._pace if pace is None else pace)
        for step in steps:
            each = step.statement
            if each.verb in ("advance", "wait"):
                builder.wait(step.key)
            for collective in step.collectives:
                builder.start(step.key, self._collective(collective, purpose(self.program, step)))
            if step.collectives and self.rates.waits:
                builder.wait(step.key)
            if each.subject in ("F", "B", "I", "W"):
                call = self.program.call(step.stage, each.of)
                graph = graph_of(self.program.region(call.region), each.subject)
                if graph is not None:
                    self._run(builder, call, graph)
        return builder.built()

    def _run(self, builder: TimelineBuilder, call: Call, graph: Graph) -> None:
        """Append a call's operations; the call's name makes the keys of their collectives unique.

        A call takes no less than its host needs to issue its operations. While no collective runs, calls of a region
        take equal times.
        """
        if builder.is_quiet:
            alone = self._alone(call.region, graph, builder.pace)
            if not alone.pending and not any(piece.segment.lag for piece in alone.pieces):
                builder.append(call.name, alone)
                return
        self._lay_out(builder, call.region, graph, call.name)

    def _alone(self, region: str, graph: Graph, pace: float) -> ActionTimeline:
        """The timeline of a call of a region without other collectives."""
        key = region, id(graph), pace
        if key not in self._known_calls:
            builder = TimelineBuilder(self.rates.slowdown, pace=pace)
            self._lay_out(builder, region, graph, "")
            self._known_calls[key] = builder.built()
        return self._known_calls[key]

    @cached_property
    def _known_calls(self) -> dict[tuple[str, int, float], ActionTimeline]:
        return {}

    def _lay_out(self, builder: TimelineBuilder, region: str, graph: Graph, call: str) -> None:
        """Append the operations of a call one by one."""
        begin = builder.now
        for name, segment, awaited in self._of_graph(region, graph):
            if awaited:
                builder.wait((call, awaited))
            elif segment.op:
                builder.start((call, name), segment, call)
            else:
                builder.work(segment.seconds)
        builder.work(max(0.0, self._issued(region, graph) - (builder.now - begin)))

    def issued(self, call: Call, kind: GraphKind) -> float:
        """The seconds that the host takes to issue the operations of a call's graph."""
        graph = graph_of(self.program.region(call.region), kind)
        return 0.0 if graph is None else self._issued(call.region, graph)

    def _issued(self, region: str, graph: Graph) -> float:
        return self.scale.compute * self._operations(region, graph)[1]

    def _of_graph(self, region: str, graph: Graph) -> tuple[tuple[str, Segment, str], ...]:
        """Yields (started result, segment, awaited result); computations between two collectives are one segment."""
        kind = "segments", self.program.mesh, self.scale, region
        found = self.program.region(region)
        return self.costs.of(kind, found, graph, self.program.sizes, lambda: tuple(self._new_graph(region, graph)))

    def _operations(self, name: str, graph: Graph) -> tuple[tuple[float, ...], float]:
        """The seconds of each operation (0 for collectives), and the seconds in which the host launches all of them."""
        region, sizes = self.program.region(name), self.program.sizes
        # Collectives over these axes move nothing.
        alone = tuple(axis for axis in self.program.mesh.names if sizes[axis] == 1)

        def made() -> tuple[tuple[float, ...], float]:
            types = region.types(graph)
            seconds = (
                0.0 if _moves(op) or op.name == "wait" else self.rates.operation(op, types, sizes) for op in graph.ops
            )
            moved = (op for op in graph.ops if not (_moves(op) and dict(op.attrs)["axis"] in alone))
            issues = (_ISSUES if op.name in MOVING else effects(op.name).kernels for op in moved)
            rounds = ((1 + _ISSUES) * num_blocks(op, sizes) for op in graph.ops if num_blocks(op, sizes) > 1)
            return tuple(seconds), self.rates.host * (sum(issues) + sum(rounds))

        return self.costs.of(("seconds", alone), region, graph, sizes, made)

    def _new_graph(self, region: str, graph: Graph) -> Iterator[tuple[str, Segment, str]]:
        run: Iterable[OpPiece] = self._pieces(region, graph)
        if self.rates.pieces:
            sizes = self.program.sizes
            run = in_pieces(tuple(run), graph.ops, {axis: sizes[axis] for axis in weight_axes(sizes)})
        work = 0.0
        for piece in run:
            if not piece.started and not piece.awaited:
                work += piece.segment.seconds
                continue
            if work:
                yield "", Segment(seconds=self.scale.compute * work), ""
                work = 0.0
            yield piece.started, piece.segment, piece.awaited
        if work:
            yield "", Segment(seconds=self.scale.compute * work), ""

    def _pieces(self, region: str, graph: Graph) -> Iterator[OpPiece]:
        """Computation by operation, before it is scaled, and starts and waits of collectives."""
        sizes = self.program.sizes
        types = self.program.region(region).types(graph)
        module = self.program.calls_to(region)[0].name
        awaited = {next(op.refs()) for op in graph.ops if op.name == "wait"}
        copied: dict[str, OpPiece] = {}  # by exchange of rows: the copy that comes after it

        def label(op: Op) -> str:
            place = op.module
            return place.removeprefix(module).strip(".") or op.name.removesuffix("_backward")

        for op, seconds in zip(graph.ops, self._operations(region, graph)[0], strict=True):
            visits = num_blocks(op, sizes)
            if not _moves(op) and op.name != "wait" and visits == 1:
                yield OpPiece(op=op, segment=Segment(seconds=seconds))
                continue
            axis = dict(op.attrs).get("axis")
            if isinstance(axis, str) and sizes[axis] == 1:
                continue
            if visits > 1:
                yield from self._ring_pieces(op, types, seconds / visits, visits)
                continue
            if op.name == "wait":
                name = next(op.refs())
                yield OpPiece(op=op, awaited=name)
                yield from (copied[name],) if name in copied else ()
                continue
            made = op.results[0].name
            size = types[next(op.refs())].local_bytes(sizes)
            why, choices = reason(op, graph, types, label), _choices(self.program.region(region), op)
            if op.name in ROUTED:  # rows are put into the order of their experts, and received ones as well
                copied[made] = OpPiece(op=op, segment=Segment(seconds=self.rates.streamed(2 * size)))
                yield copied[made]
            yield OpPiece(op=op, segment=self._moving(op.name, str(axis), size, why, choices), started=made)
            if made not in awaited:
                yield OpPiece(op=op, awaited=made)
                yield from (copied[made],) if made in copied else ()

    def _ring_pieces(self, op: Op, types: Mapping[str, TensorType], seconds: float, visits: int) -> Iterator[OpPiece]:
        """The pieces of ring attention: while a round of `seconds` computes with keys and values, they travel to the
        next rank; their gradients follow one round later.
        """
        name = op.results[0].name
        shifts = (
            self._collective(each, "keys and values go around")
            for each in collectives_of(op, types, self.program.sizes)
        )
        behind = ""
        for step in range(visits):
            last = step + 1 == visits
            if not last:
                yield OpPiece(op=op, segment=next(shifts), started=f"{name} {step}")
            yield OpPiece(op=op, segment=Segment(seconds=seconds))
            if op.name.endswith("_backward"):
                if behind:
                    yield OpPiece(op=op, awaited=behind)
                behind = f"gradients of {name} {step}"
                yield OpPiece(op=op, segment=next(shifts), started=behind)
            if not last:
                yield OpPiece(op=op, awaited=f"{name} {step}")
        if behind:
            yield OpPiece(op=op, awaited=behind)

    def once(self, place: int) -> ActionTimeline:
        """The calls of phase `step`, concurrent with the first gathers, and the starts of the gathers of updated
        parameters.
        """
        opening = takewhile(lambda item: item[0] != "prepare", self._executions[place])
        gathers = chain.from_iterable(steps for _, steps in opening)
        outside = self._surrounding_steps[place]
        return self._played((*gathers, *outside.get("prepare", ()), *outside.get("refresh", ())))

    def _tail(self, place: int) -> ActionTimeline:
        return self._played(self._surrounding_steps[place].get("end", ()))

    @property
    def update_seconds(self) -> float:
        """The seconds of the optimizer's update on the first pipeline rank, without communication."""
        return self._updating(0)

    def _updating(self, place: int) -> float:
        """The seconds of AdamW, which is bound by memory traffic.

        In tables with sparse gradients, only the rows that a step looks up are updated.
        """
        rows = touched_rows(self.program, self.program.stages_at(place))
        size = sum(
            parameter.type.local_bytes(self.program.sizes)
            if not parameter.sparse
            else sum(rows.get(parameter.name, ())) * self._row_bytes(parameter)
            for parameter in self.program.parameters_at(place)
            if parameter.trainable
        )
        return self.updated(size)

    def _update(self, place: int) -> ActionTimeline:
        builder = TimelineBuilder(pace=self._pace)
        builder.work(self._updating(place))
        return builder.built()

    def updated(self, size: int) -> float:
        """The seconds of AdamW on parameters of `size` bytes."""
        return self.scale.compute * self.rates.streamed(UPDATE * size)

    def _row_bytes(self, parameter: Parameter) -> int:
        rows, *_ = parameter.type.layout.local_shape(self.program.sizes)
        return parameter.type.local_bytes(self.program.sizes) // rows

    def _collective(self, collective: Collective, why: str) -> Segment:
        return self._moving(collective.op, collective.group, collective.bytes, why)

    def collective(self, op: str, over: str, size: int) -> float:
        """Seconds of a collective on `size` bytes of each rank, over axes ("dp,tp") or pipeline ranks ("pp 0,2")."""
        return self._moving(op, over, size, "").seconds

    def _moving(self, op: str, over: str, size: int, why: str, choices: int = 1) -> Segment:
        key = op, over, size, choices
        if key not in self._moved:
            axes, _, ranks = over.partition(" ")
            places = tuple(map(int, ranks.split(","))) if ranks else ()
            takes = self.rates.collective(op, self.program.mesh, axes.split(","), places, size, choices)
            links = self.rates.links(self.program.mesh, axes.split(","), places)
            lag = self.rates.lag(self.program.mesh, axes.split(","), places)
            self._moved[key] = self.scale.communication * takes, links, lag
        seconds, links, lag = self._moved[key]
        return Segment(seconds=seconds, op=op, over=over, bytes=size, why=why, links=links, lag=lag)

    @cached_property
    def _moved(self) -> dict[tuple[str, str, int, int], tuple[float, tuple[str, ...], float]]:
        return {}

    @cached_property
    def _types(self) -> Mapping[str, TensorType]:
        return self.program.value_types()

    def arrivals(self) -> Iterator[tuple[int, str, str]]:
        """Yields (stage, producer, consumer) for every value that is sent between ranks."""
        program = self.program
        backward = ["I" if "I" in program.kinds(stage) else "B" for stage in range(program.stages)]
        sent = dict.fromkeys((each.source, each.target, each.gradient) for each in program.sent)
        for source, target, gradient in sent:
            for index in range(program.microbatches):
                yield source, f"{source}F{index}", f"{target}F{index}"
                if gradient:
                    yield target, f"{target}{backward[target]}{index}", f"{source}{backward[source]}{index}"

    def split(self) -> tuple[float, float, float]:
        """Seconds of computation, of waits for communication, and of waits for a peer: means over coordinates."""
        transfers: dict[str, float] = {}
        takes = {stage: self.transfer(stage) for stage in range(self.program.stages)}
        for stage, _, target in self.arrivals():
            transfers[target] = max(transfers.get(target, 0.0), takes[stage])
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

    def causes(self) -> dict[str, float]:
        """Seconds of waits by collective and axes, and for values of other stages: means over coordinates."""
        found: dict[str, float] = {}
        for spans in self.places:
            for span in spans:
                for name, seconds in span.inside.waited:
                    found[name] = found.get(name, 0.0) + seconds / len(self.places)
        return found

    def scaled(self, scale: Scale) -> Forecast:
        return replace(self, scale=scale)


def _moves(op: Op) -> bool:
    """Whether an operation is a collective over an axis of the mesh."""
    return op.name in MOVING and isinstance(dict(op.attrs).get("axis"), str)


def _choices(region: Region, op: Op) -> int:
    """The number of a token's experts, if an exchange moves rows to them; 1 if it is not known."""
    if op.name not in ROUTED:
        return 1
    made, makers = region.forward.definitions(), region.forward.makers()
    _, order, *_ = op.refs()
    name = next(makers[order].refs()) if order in makers else ""
    while name in makers and makers[name].name in VIEWS:
        name = next(makers[name].refs())
    shape = made[name].type.shape if name in made else ()
    return shape[-1] if len(shape) > 1 else 1


def _by_action(
    executions: Iterable[Iterable[tuple[Action | str, tuple[StatementRun, ...]]]],
) -> dict[tuple[int, str, int | None], tuple[StatementRun, ...]]:
    found: dict[tuple[int, str, int | None], tuple[StatementRun, ...]] = {}
    for action, steps in chain.from_iterable(executions):
        if isinstance(action, Action) and action.kind != "UNSHARD":
            found[action.stage, action.kind, action.microbatch] = steps
            found[action.stage, action.kind, None] = steps
    return found
