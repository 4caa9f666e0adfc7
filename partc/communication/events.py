"""The communication of ranks as a sequence of events: the collectives that they enter, and messages between stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from partc.communication.exchanges import graph_of
from partc.communication.execution import Execution, StatementRun
from partc.errors import Source
from partc.ir.collectives import MOVING, ROUTED, collectives_of
from partc.ir.mesh import PIPELINE_AXIS, Mesh
from partc.ir.naming import gradient_owner
from partc.ir.program import (
    ITEMSIZE,
    Action,
    Collective,
    Graph,
    Op,
    Program,
    Region,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered(Collective):
    """A collective that a rank enters in an action, with the attributes on which all ranks must agree."""

    attrs: tuple[tuple[str, object], ...] = ()
    action: str = ""
    source: Source | None = None

    @classmethod
    def of(cls, each: Collective) -> Entered:
        return cls(op=each.op, axes=each.axes, shape=each.shape, dtype=each.dtype, code=each.code, places=each.places)

    @property
    def content(self) -> tuple[object, ...]:
        """The attributes on which the ranks must agree."""
        return self.op, self.shape, self.dtype, self.attrs

    def __str__(self) -> str:
        where = f"pipeline ranks {self.places}" if self.places else " and ".join(self.axes)
        at = f" ({self.source})" if self.source is not None and self.source.line else ""
        return f"{self.action}: {self.op} of {self.dtype}{list(self.shape)} over {where}{at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A send or a posted receive, which do not wait; or the wait for a posted receive.

    Every `link` from one stage to another is a separate channel: the first receive posted gets the first send.
    """

    kind: Literal["send", "recv", "wait"]
    value: str
    link: tuple[int, int]
    place: int  # the pipeline coordinate of the other rank; on other axes, both have the same coordinate
    microbatch: int
    shape: tuple[int, ...]
    dtype: str
    action: str = ""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def content(self) -> tuple[object, ...]:
        """The attributes on which both ends must agree."""
        return self.value, self.microbatch, self.shape, self.dtype

    def __str__(self) -> str:
        way = f"to stage {self.link[1]}" if self.kind == "send" else f"from stage {self.link[0]}"
        return f"{self.action}: {self.kind} of {self.value} {self.dtype}{list(self.shape)} {way}"


Event = Entered | Message


def message(program: Program, step: StatementRun) -> Message | None:
    """The message between stages in a statement, for microbatch 0; None for other statements."""
    each = step.statement
    if each.subject != "value" or each.peer is None:
        return None
    types = program.value_types()
    type = types[each.of if each.of in types else gradient_owner(each.of)]
    kinds: Mapping[str, Literal["send", "recv", "wait"]] = {"send": "send", "receive": "recv", "wait": "wait"}
    return Message(
        kind=kinds[each.verb],
        value=each.of,
        link=(step.stage, each.peer) if each.verb == "send" else (each.peer, step.stage),
        place=program.place(each.peer),
        microbatch=0,
        shape=type.layout.local_shape(program.sizes),
        dtype=type.dtype,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationPlan:
    """The events of all ranks, by pipeline coordinate."""

    mesh: Mesh
    places: tuple[tuple[Event, ...], ...]

    def events_of(self, rank: int) -> tuple[Event, ...]:
        return self.places[self.mesh.coordinate(rank).get(PIPELINE_AXIS, 0)]


def events(program: Program, *, crossing: bool = False, proving: bool = False) -> CommunicationPlan:
    """The communication of one step and of the actions before the first step, in order.

    With `crossing`, only communication between pipeline coordinates. The rest always matches, as all ranks at a
    coordinate have the same events. With `proving`, statements are checked against the types of parameters.
    """
    of = _Events(program, crossing)
    places = []
    for place in range(program.mesh.axis(PIPELINE_AXIS)):
        execution = Execution(program, place, proving=proving)
        found: list[Event] = []
        for action, steps in (*execution.before_first_step(), *execution.step()):
            found.extend(of.action(steps, action))
        places.append(tuple(found))
    return CommunicationPlan(mesh=program.mesh, places=tuple(places))


def _crosses(event: Event) -> bool:
    return isinstance(event, Message) or bool(event.places) or PIPELINE_AXIS in event.axes


@dataclass(frozen=True)
class _Events:
    """Derives the events of statements, including the collectives in regions' graphs."""

    program: Program
    crossing: bool = False  # only events between pipeline coordinates

    @cached_property
    def _entered_by_graph(self) -> dict[tuple[str, str], tuple[Entered, ...]]:
        return {}

    def action(self, steps: Sequence[StatementRun], action: Action | str) -> Iterator[Event]:
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

    def _template(self, steps: Iterable[StatementRun]) -> Iterator[Event]:
        """The events of an action, without the action's name; equal actions share them."""
        for step in steps:
            found: Iterable[Event]
            if (sent := message(self.program, step)) is not None:
                found = (sent,)
            elif step.statement.verb == "run":
                found = self._run(step)
            else:
                found = map(Entered.of, step.collectives)
            yield from (event for event in found if not self.crossing or _crosses(event))

    def _run(self, step: StatementRun) -> tuple[Entered, ...]:
        name, kind = step.statement.of, step.statement.subject
        if kind not in ("F", "B", "I", "W"):
            return ()
        key = self.program.call(step.stage, name).region, kind
        if key not in self._entered_by_graph:
            region = self.program.region(key[0])
            graph = graph_of(region, kind)
            self._entered_by_graph[key] = tuple(self._of_graph(region, graph)) if graph is not None else ()
        return self._entered_by_graph[key]

    def _of_graph(self, region: Region, graph: Graph) -> Iterator[Entered]:
        types = region.types(graph)
        for op in graph.ops:
            if op.name == "route":
                yield self._counts(op)
            agreed = op.name in MOVING and op.name not in ROUTED
            attrs = tuple([item for item in op.attrs if item[0] != "axis"]) if agreed else ()
            for each in collectives_of(op, types, self.program.sizes):
                yield replace(Entered.of(each), attrs=attrs, source=op.source)

    def _counts(self, op: Op) -> Entered:
        """The exchange of the numbers of rows by expert."""
        axis = str(dict(op.attrs)["axis"])
        ways, count = self.program.sizes[axis], op.args[1]
        assert isinstance(count, int)
        return Entered(op="all_to_all", axes=(axis,), shape=(ways, count // ways), dtype="i64", source=op.source)
