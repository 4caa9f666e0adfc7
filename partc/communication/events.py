"""The communication of ranks as a sequence of events: the collectives that they enter, and messages between stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from partc.communication.exchanges import graph_of
from partc.communication.execution import Execution, StatementRun
from partc.errors import Source
from partc.ir.collectives import MOVING, ROUTED, inside
from partc.ir.mesh import PIPELINE_AXIS, Mesh
from partc.ir.program import (
    ITEMSIZE,
    Action,
    Collective,
    Graph,
    Op,
    Program,
    Region,
    TensorType,
    Value,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered(Collective):
    """A collective as a rank enters it: in an action, with the attributes that the ranks must agree on."""

    attrs: tuple[tuple[str, object], ...] = ()
    action: str = ""
    source: Source | None = None

    @classmethod
    def of(cls, each: Collective) -> Entered:
        return cls(op=each.op, axes=each.axes, shape=each.shape, dtype=each.dtype, code=each.code, places=each.places)

    @property
    def content(self) -> tuple[object, ...]:
        """The facts that the ranks must agree on."""
        return self.op, self.shape, self.dtype, self.attrs

    def __str__(self) -> str:
        where = f"pipeline ranks {self.places}" if self.places else " and ".join(self.axes)
        at = f" ({self.source})" if self.source is not None and self.source.line else ""
        return f"{self.action}: {self.op} of {self.dtype}{list(self.shape)} over {where}{at}"


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


Event = Entered | Message


def message(program: Program, step: StatementRun) -> Message | None:
    """The message of a step between stages, as of microbatch 0; None for any other step."""
    each = step.statement
    if each.subject != "value" or each.peer is None:
        return None
    types = program.value_types()
    type = types[each.of if each.of in types else each.of.removeprefix("grad_")]
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
    """The events of all ranks: those of the pipeline coordinate, unless `overrides` has events of the rank itself."""

    mesh: Mesh
    places: tuple[tuple[Event, ...], ...]
    overrides: Mapping[int, tuple[Event, ...]] = field(default_factory=dict)

    def of(self, rank: int) -> tuple[Event, ...]:
        found = self.overrides.get(rank)
        return self.places[self.mesh.coordinate(rank).get(PIPELINE_AXIS, 0)] if found is None else found


def events(program: Program, *, crossing: bool = False, proving: bool = False) -> CommunicationPlan:
    """The communication of one step and of the actions before the first step, in order.

    With `crossing`, only that between pipeline coordinates: without overrides, all ranks at a coordinate have the same
    events, so that they enter their other collectives alike. With `proving`, statements are held to their types.
    """
    of = _Events(program, crossing)
    places = []
    for place in range(program.mesh.axis(PIPELINE_AXIS)):
        execution = Execution(program, place, proving=proving)
        found: list[Event] = []
        for action, steps in (*execution.once(), *execution.step()):
            found.extend(of.action(steps, action))
        places.append(tuple(found))
    return CommunicationPlan(mesh=program.mesh, places=tuple(places))


def _crosses(event: Event) -> bool:
    return isinstance(event, Message) or bool(event.places) or PIPELINE_AXIS in event.axes


@dataclass(frozen=True)
class _Events:
    """The events of steps, those of regions' graphs included."""

    program: Program
    crossing: bool = False  # only between pipeline coordinates

    @cached_property
    def _found(self) -> dict[tuple[str, str], tuple[Entered, ...]]:
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
        """The events of equal actions, without the action's name."""
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
        if key not in self._found:
            region = self.program.region(key[0])
            graph = graph_of(region, kind)
            self._found[key] = tuple(self._of_graph(region, graph)) if graph is not None else ()
        return self._found[key]

    def _of_graph(self, region: Region, graph: Graph) -> Iterator[Entered]:
        values: dict[str, Value] = {value.name: value for value in region.params} | graph.definitions()
        types = {name: value.type for name, value in values.items()}
        for op in graph.ops:
            for name, axis, size, dtype in inside(op, types, self.program.sizes):
                yield Entered(op=name, axes=(axis,), shape=(size,), dtype=dtype, source=op.source)
            if op.name in ROUTED:
                yield self._rows(op, values[next(op.refs())].type)
            elif op.name in MOVING:
                attrs = dict(op.attrs)
                operand = values[next(op.refs())].type
                yield Entered(
                    op=op.name,
                    axes=(str(attrs.pop("axis")),),
                    shape=operand.layout.local_shape(self.program.sizes),
                    dtype=operand.dtype,
                    attrs=tuple(attrs.items()),
                    source=op.source,
                )

    def _rows(self, op: Op, operand: TensorType) -> Entered:
        """The exchange of rows, or of their numbers by expert. The number of rows is the data's: a mean stands here."""
        axis = str(dict(op.attrs)["axis"])
        if op.name == "route":
            ways, count = self.program.sizes[axis], op.args[1]
            assert isinstance(count, int)
            return Entered(op="all_to_all", axes=(axis,), shape=(ways, count // ways), dtype="i64", source=op.source)
        shape = operand.layout.local_shape(self.program.sizes)
        return Entered(op="exchange", axes=(axis,), shape=shape, dtype=operand.dtype, source=op.source)
