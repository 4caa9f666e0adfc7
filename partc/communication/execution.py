"""The execution of a rank's step: the actions of its schedule, and their statements, in order.

The proof of communication, the accounts of bytes and time, and the reports all read a program's actions through this
module. Ranks that differ only on axes other than the pipeline's do the same, so one rank stands for its pipeline
coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from partc.communication.exchanges import Collective, Exchanges, Levels, graph_of, loss_sums, shared_sums
from partc.errors import InternalError
from partc.ir.collectives import MOVING, ROUTED, inside
from partc.ir.mesh import PIPELINE_AXIS, Mesh
from partc.ir.program import (
    ITEMSIZE,
    Action,
    ActionStatement,
    BodyKind,
    Call,
    Graph,
    GraphKind,
    Op,
    Program,
    Region,
    TensorType,
    Value,
)

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A send or the post of a receive, neither of which waits; or the wait for a posted receive.

    Every `link`, from one stage to another, is a channel of its own: the first receive posted gets the first send.
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
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def content(self) -> tuple[object, ...]:
        """The facts that both ends must agree on."""
        return self.value, self.microbatch, self.shape, self.dtype

    def __str__(self) -> str:
        way = f"to stage {self.link[1]}" if self.kind == "send" else f"from stage {self.link[0]}"
        return f"{self.action}: {self.kind} of {self.value} {self.dtype}{list(self.shape)} {way}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A collective starts; its `key` is unique among those under way."""

    key: Key
    collective: Collective
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The wait for a collective that has started."""

    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRun:
    """A run of a call's graph, with the collectives inside it."""

    call: Call
    kind: GraphKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """The last use of a call's whole parameters ends."""

    stage: int
    call: str


Step = Start | Wait | GraphRun | Message | Free
Event = Collective | Message


@dataclass(frozen=True, slots=True)
class _Sum:
    """The sum of a piece of memory: its collectives in order, and the number of those that have started."""

    key: Key
    chain: tuple[Collective, ...]
    started: int
    relayed: bool  # whether the second collective starts as soon as the first has ended
    why: str


@dataclass(slots=True)
class _UnderWay:
    """The exchanges of a rank under way between two actions. Equal states lead to equal steps."""

    holds: dict[tuple[int, str], int] = field(default_factory=dict)  # (stage, call) -> gathers that are not freed yet
    under_way: dict[Key, int] = field(default_factory=dict)  # exchange -> number of its levels that have started
    made: dict[tuple[int, str], GraphKind] = field(default_factory=dict)  # the graph that each call ran last
    sums: tuple[_Sum, ...] = ()

    def key(self) -> Key:
        return tuple(self.holds.items()), tuple(self.under_way.items()), self.sums

    def copy(self) -> _UnderWay:
        return _UnderWay(dict(self.holds), dict(self.under_way), dict(self.made), self.sums)


class Execution:
    """The execution of the ranks at one pipeline coordinate.

    Raises InternalError if a body waits for an exchange that has not started, or frees or reads parameters that have
    not been gathered.
    """

    def __init__(self, program: Program, place: int, exchanges: Exchanges | None = None) -> None:
        self.program = program
        self.place = place
        self.exchanges = exchanges or Exchanges(program)
        self.stages = program.stages_at(place)
        self._bodies = {body.name: body.statements for body in program.bodies}
        self._calls = {(call.stage, call.name): call for call in program.calls}
        self._types = program.value_types()

    @cached_property
    def row(self) -> tuple[Action, ...]:
        return self.program.schedule[self.place] if self.program.schedule else ()

    def once(self) -> Iterator[tuple[str, tuple[Step, ...]]]:
        """The actions before the first step."""
        yield "start", tuple(self._of_stages("INIT", _UnderWay()))
        yield "setup", tuple(self._of_stages("SETUP", _UnderWay()))

    def step(self, *, updates: bool = True) -> Iterator[tuple[Action | str, tuple[Step, ...]]]:
        """The actions of a step in order, each with its steps; `prepare` and `refresh` come first, `end` last.

        Without `updates`, the step only accumulates the gradients of a batch that is not the first one. Microbatches
        with equal steps share one tuple, whose transfers are those of microbatch 0.
        """
        state = _UnderWay()
        opening = 0
        while opening < len(self.row) and self.row[opening].kind == "UNSHARD":
            yield self.row[opening], tuple(self._action(self.row[opening], state, last=False))
            opening += 1
        yield "prepare", tuple(self._of_stages("PREPARE", state))
        if updates:
            yield "refresh", tuple(self._of_stages("REFRESH", state))
        final = {action.stage: action for action in self.row if updates and action.kind in ("B", "W")}
        known: dict[Key, tuple[tuple[Step, ...], _UnderWay]] = {}
        for action in self.row[opening:]:
            if action.kind == "REDUCE_GRAD" and not updates:
                continue
            last = action == final.get(action.stage)
            key = (action.stage, action.kind, action.ahead, last, state.key())
            if key not in known:
                found = tuple(self._action(replace(action, microbatch=None), state := state.copy(), last=last))
                known[key] = found, state
            steps, state = known[key]
            yield action, steps
        if not updates:
            return
        if state.holds or state.under_way or state.sums:
            raise InternalError(f"pipeline rank {self.place} ends a step with something under way: {state}")
        yield "end", tuple(self._statements(f"{self.place}END", self.place, state, None))

    def gathered(self, action: Action) -> tuple[tuple[int, str], ...]:
        """The calls (with their stages) that `ahead` stands for in an action."""
        return tuple(
            (int(name.rstrip("FBIW")), statement.of)
            for name in action.ahead
            for statement in self._bodies[name]
            if (statement.verb, statement.subject) == ("wait", "gather")
        )

    def _of_stages(self, kind: BodyKind, state: _UnderWay) -> Iterator[Step]:
        for stage in self.stages:
            yield from self._statements(f"{stage}{kind}", stage, state, None)

    def _action(self, action: Action, state: _UnderWay, *, last: bool) -> Iterator[Step]:
        if action.kind == "UNSHARD":
            for stage, call in self.gathered(action)[: self.exchanges.levels]:
                yield from self._gather(stage, call, state)
            return
        yield from self._statements(f"{action.stage}{action.kind}", action.stage, state, action, last=last)

    def _statements(
        self, body: str, stage: int, state: _UnderWay, action: Action | None, *, last: bool = False
    ) -> Iterator[Step]:
        following = self.gathered(action) if action is not None else ()
        for each in self._bodies.get(body, ()):
            if each.last and not last:
                continue
            if each.ahead:
                if each.ahead <= len(following):
                    yield from self._statement(each, *following[each.ahead - 1], state)
                continue
            yield from self._statement(each, stage, each.of, state)

    def _statement(self, each: ActionStatement, stage: int, call: str, state: _UnderWay) -> Iterator[Step]:
        match each.verb, each.subject:
            case "run", ("F" | "B" | "I" | "W"):
                yield self._run(stage, call, each.subject, state)
            case "start", "gather":
                yield from self._gather(stage, call, state)
            case "start", "refresh":
                yield from self._start(("refresh", stage, call), state)
            case "start", "scatter":
                if any(key[:3] == ("scatter", stage, call) for key in state.under_way):
                    raise InternalError(f"the gradients of {call} are scattered again before the last time has ended")
                yield from self._start(("scatter", stage, call, state.made[stage, call]), state)
            case (("relay" | "wait"), ("gather" | "refresh" | "scatter")):
                going = self._relay if each.verb == "relay" else self._wait
                for key in [key for key in state.under_way if key[:3] == (each.subject, stage, call)]:
                    yield from going(key, state)
            case "free", "gather":
                yield from self._free(stage, call, state)
            case "start", "sums":
                yield from self._start_sums(stage, call, state)
            case "relay", "sums":
                yield from self._relay_sums(stage, state)
            case "wait", "sums":
                yield from self._wait_sums(stage, state)
            case "start", "shared":
                yield from self._at_once(
                    shared_sums(self.exchanges, self.place), "stages that share weights sum their gradients"
                )
            case "start", "loss":
                yield from self._at_once(loss_sums(self.program, self.place), "the loss of the whole batch")
            case (("send" | "receive" | "wait"), "value"):
                yield self._transfer(each, stage)
            case "run", "update":
                return
            case _:
                raise InternalError(f"an action cannot {each}")

    # -- exchanges of parameters and gradients by call ------------------------------------------

    def _levels(self, key: Key) -> tuple[Levels, str]:
        """The collectives of an exchange, and their purpose."""
        if key not in self._known:
            self._known[key] = self._levels_of(*key)  # type: ignore[arg-type]
        return self._known[key]

    @cached_property
    def _known(self) -> dict[Key, tuple[Levels, str]]:
        return {}

    def _levels_of(self, subject: str, stage: int, name: str | int, kind: GraphKind = "B") -> tuple[Levels, str]:
        exchanges = self.exchanges
        if isinstance(name, int):
            bucket = exchanges.sums(stage).buckets[name]
            why = f"gradients that are complete after {bucket.after}" if bucket.after else _REST
            return exchanges.scattered_bucket(bucket), why
        call = self._calls[stage, name]
        match subject:
            case "gather":
                return exchanges.gather(call.params), f"{name} needs its parameters whole"
            case "refresh":
                why = "every rank keeps the updated parameters whole"
                return exchanges.gather(exchanges.kept(stage)[name]), why
            case _:
                return exchanges.scatter(call, kind), f"{name}: each rank keeps its part of the gradients"

    def _start(self, key: Key, state: _UnderWay) -> Iterator[Step]:
        if key in state.under_way:
            raise InternalError(f"{_shown(key)} starts again before it was waited for")
        state.under_way[key] = 0
        yield from self._next(key, state)

    def _next(self, key: Key, state: _UnderWay) -> Iterator[Step]:
        """Start an exchange's next level, after the end of the level before."""
        levels, why = self._levels(key)
        done = state.under_way[key]
        state.under_way[key] = done + 1
        if done >= len(levels):
            return
        for index, collective in enumerate(levels[done]):
            if done and index < len(levels[done - 1]):
                yield Wait(key=(*key, done - 1, index))
            yield Start(key=(*key, done, index), collective=collective, why=why)

    def _relay(self, key: Key, state: _UnderWay) -> Iterator[Step]:
        if state.under_way[key] < len(self._levels(key)[0]):
            yield from self._next(key, state)

    def _wait(self, key: Key, state: _UnderWay) -> Iterator[Step]:
        """Wait for an exchange, and run its remaining levels."""
        levels, _ = self._levels(key)
        while state.under_way[key] < len(levels):
            yield from self._next(key, state)
        for index, _ in enumerate(levels[-1] if levels else ()):
            yield Wait(key=(*key, len(levels) - 1, index))
        del state.under_way[key]

    def _gather(self, stage: int, call: str, state: _UnderWay) -> Iterator[Step]:
        holds = state.holds.get((stage, call), 0)
        state.holds[stage, call] = holds + 1
        if not holds:
            yield from self._start(("gather", stage, call), state)

    def _free(self, stage: int, call: str, state: _UnderWay) -> Iterator[Step]:
        holds = state.holds.pop((stage, call), 0)
        if not holds or ("gather", stage, call) in state.under_way:
            raise InternalError(f"the parameters of {call} are freed before they are there")
        if holds > 1:
            state.holds[stage, call] = holds - 1
        else:
            yield Free(stage=stage, call=call)

    def _run(self, stage: int, name: str, kind: GraphKind, state: _UnderWay) -> GraphRun:
        call = self._calls[stage, name]
        there = state.holds.get((stage, name)) and ("gather", stage, name) not in state.under_way
        coming = any(("refresh", stage, first) in state.under_way for first in self._refreshed(stage, name))
        if coming or (not there and self.exchanges.gathers(call, kind)):
            raise InternalError(f"{name} reads its parameters before they are there")
        state.made[stage, name] = kind
        return GraphRun(call=call, kind=kind)

    def _refreshed(self, stage: int, name: str) -> frozenset[str]:
        """The calls at which the gathers of the parameters that a call reads are waited for."""
        if (stage, name) not in self._brought:
            kept = self.exchanges.kept(stage)
            read = set(self._calls[stage, name].params)
            self._brought[stage, name] = frozenset(first for first, names in kept.items() if read.intersection(names))
        return self._brought[stage, name]

    @cached_property
    def _brought(self) -> dict[tuple[int, str], frozenset[str]]:
        return {}

    # -- sums of gradients, once per step -------------------------------------------------------

    def _start_sums(self, stage: int, call: str, state: _UnderWay) -> Iterator[Step]:
        sums = self.exchanges.sums(stage)
        for index, bucket in enumerate(sums.buckets):
            if bucket.after != call:
                continue
            why = f"gradients that are complete after {call}" if call else _REST
            if bucket.scattered:
                yield from self._scatter_bucket(("bucket", stage, index), state, settle=not call)
                continue
            both = all(bucket.near_and_far)
            for piece, chain in enumerate(sums.chains(bucket)):
                key = ("sum", stage, index, piece)
                yield Start(key=(*key, 0), collective=chain[0], why=why)
                state.sums = (*state.sums, _Sum(key, chain, 1, both, why))

    def _scatter_bucket(self, key: Key, state: _UnderWay, *, settle: bool) -> Iterator[Step]:
        """Scatter a bucket. Backward continues, and sends its gradients, while earlier ones are under way."""
        for other in self._buckets_under_way(key[1], state):
            yield from self._relay(other, state)
        yield from self._start(key, state)
        if settle:
            yield from self._settle_buckets(key[1], state)

    def _settle_buckets(self, stage: object, state: _UnderWay) -> Iterator[Step]:
        under_way = self._buckets_under_way(stage, state)
        for key in under_way:
            yield from self._relay(key, state)
        for key in under_way:
            yield from self._wait(key, state)

    def _buckets_under_way(self, stage: object, state: _UnderWay) -> list[Key]:
        return [key for key in state.under_way if key[:2] == ("bucket", stage)]

    def _relay_sums(self, stage: int, state: _UnderWay) -> Iterator[Step]:
        for key in self._buckets_under_way(stage, state):
            yield from self._relay(key, state)
        relayed = []
        for each in state.sums:
            if each.key[1] == stage and each.relayed and each.started == 1:
                yield Wait(key=(*each.key, 0))
                yield Start(key=(*each.key, 1), collective=each.chain[1], why=each.why)
                each = replace(each, started=2)
            relayed.append(each)
        state.sums = tuple(relayed)

    def _wait_sums(self, stage: int, state: _UnderWay) -> Iterator[Step]:
        yield from self._settle_buckets(stage, state)
        for each in state.sums:
            if each.key[1] != stage:
                continue
            for number in range(each.started, len(each.chain)):
                yield Wait(key=(*each.key, number - 1))
                yield Start(key=(*each.key, number), collective=each.chain[number], why=each.why)
            yield Wait(key=(*each.key, len(each.chain) - 1))
        state.sums = tuple(each for each in state.sums if each.key[1] != stage)

    def _at_once(self, collectives: Iterable[Collective], why: str) -> Iterator[Step]:
        for collective in collectives:
            yield Start(key=("at once",), collective=collective, why=why)
            yield Wait(key=("at once",))

    # -- between stages -------------------------------------------------------------------------

    def _transfer(self, each: ActionStatement, stage: int) -> Message:
        assert each.peer is not None
        kind: Literal["send", "recv", "wait"] = {"send": "send", "receive": "recv", "wait": "wait"}[each.verb]  # type: ignore[assignment]
        type = self._types[each.of if each.of in self._types else each.of.removeprefix("grad_")]
        return Message(
            kind=kind,
            value=each.of,
            link=(stage, each.peer) if kind == "send" else (each.peer, stage),
            place=self.program.place(each.peer),
            microbatch=0,
            shape=type.layout.local_shape(self.program.sizes),
            dtype=type.dtype,
        )


_REST = "gradients that are summed at the step's end"


def _shown(key: Key) -> str:
    return " ".join(map(str, key[::2]))


# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationPlan:
    """The events of all ranks: those of the pipeline coordinate, unless `overrides` has events of the rank itself."""

    mesh: Mesh
    places: tuple[tuple[Event, ...], ...]
    overrides: Mapping[int, tuple[Event, ...]] = field(default_factory=dict)

    def of(self, rank: int) -> tuple[Event, ...]:
        found = self.overrides.get(rank)
        return self.places[self.mesh.coordinate(rank).get(PIPELINE_AXIS, 0)] if found is None else found


def events(program: Program, *, crossing: bool = False) -> CommunicationPlan:
    """The communication of one step and of the actions before the first step, in order.

    With `crossing`, only that between pipeline coordinates: without overrides, all ranks at a coordinate have the same
    events, so that they enter their other collectives alike.
    """
    exchanges = Exchanges(program)
    inside = _Collectives(program, crossing)
    places = []
    for place in range(program.mesh.axis(PIPELINE_AXIS)):
        execution = Execution(program, place, exchanges)
        found: list[Event] = []
        for action, steps in (*execution.once(), *execution.step()):
            found.extend(inside.events(steps, action))
        places.append(tuple(found))
    return CommunicationPlan(mesh=program.mesh, places=tuple(places))


def _crosses(event: Event) -> bool:
    return isinstance(event, Message) or bool(event.places) or PIPELINE_AXIS in event.axes


@dataclass(frozen=True)
class _Collectives:
    """The collectives of steps, and of regions' graphs inside them."""

    program: Program
    crossing: bool = False  # only between pipeline coordinates

    @cached_property
    def _regions(self) -> Mapping[str, Region]:
        return {region.name: region for region in self.program.regions}

    @cached_property
    def _found(self) -> dict[tuple[str, GraphKind], tuple[Collective, ...]]:
        return {}

    def events(self, steps: Iterable[Step], action: Action | str) -> Iterator[Event]:
        name, microbatch = (action.name, action.microbatch or 0) if isinstance(action, Action) else (action, 0)
        if id(steps) not in self._templates:
            self._templates[id(steps)] = steps, tuple(self._template(steps))
        for event in self._templates[id(steps)][1]:
            if isinstance(event, Message):
                yield replace(event, action=name, microbatch=microbatch)
            else:
                yield replace(event, action=name)

    @cached_property
    def _templates(self) -> dict[int, tuple[object, tuple[Event, ...]]]:
        return {}

    def _template(self, steps: Iterable[Step]) -> Iterator[Event]:
        """The events of equal actions, without the action's name."""
        for step in steps:
            match step:
                case Start():
                    found: Iterable[Event] = (step.collective,)
                case Message():
                    found = (step,)
                case GraphRun():
                    found = self.of(step.call.region, step.kind)
                case _:
                    found = ()
            yield from (event for event in found if not self.crossing or _crosses(event))

    def of(self, name: str, kind: GraphKind) -> tuple[Collective, ...]:
        if (name, kind) not in self._found:
            region = self._regions[name]
            graph = graph_of(region, kind)
            self._found[name, kind] = tuple(self._of_graph(region, graph)) if graph is not None else ()
        return self._found[name, kind]

    def _of_graph(self, region: Region, graph: Graph) -> Iterator[Collective]:
        values: dict[str, Value] = {value.name: value for value in region.params} | graph.definitions()
        types = {name: value.type for name, value in values.items()}
        for op in graph.ops:
            for name, axis, size, dtype in inside(op, types, self.program.sizes):
                yield Collective(op=name, axes=(axis,), shape=(size,), dtype=dtype, source=op.source)
            if op.name in ROUTED:
                yield self._exchange(op, values[next(op.refs())].type)
            elif op.name in MOVING:
                attrs = dict(op.attrs)
                operand = values[next(op.refs())].type
                yield Collective(
                    op=op.name,
                    axes=(str(attrs.pop("axis")),),
                    shape=operand.layout.local_shape(self.program.sizes),
                    dtype=operand.dtype,
                    attrs=tuple(attrs.items()),
                    source=op.source,
                )

    def _exchange(self, op: Op, operand: TensorType) -> Collective:
        """The exchange of rows, or of their numbers by expert. The number of rows is the data's: a mean stands here."""
        axis = str(dict(op.attrs)["axis"])
        if op.name == "route":
            ways, count = self.program.sizes[axis], op.args[1]
            assert isinstance(count, int)
            return Collective(op="all_to_all", axes=(axis,), shape=(ways, count // ways), dtype="i64", source=op.source)
        shape = operand.layout.local_shape(self.program.sizes)
        return Collective(op="exchange", axes=(axis,), shape=shape, dtype=operand.dtype, source=op.source)
