"""When each action of a schedule runs, for given durations: what the pictures of a schedule show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partc.errors import InternalError
from partc.program import Action, Program

# In units of one forward pass: a backward pass computes gradients of inputs and of weights.
DURATIONS: Mapping[str, float] = {"F": 1.0, "B": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An action and when it runs."""

    action: Action
    start: float
    end: float


def timeline(program: Program, durations: Mapping[str, float] = DURATIONS) -> tuple[tuple[Span, ...], ...]:
    """Computations of every pipeline coordinate in time; transfers take none.

    A stage does its actions in order; a receive waits until the other stages have sent. Raises
    InternalError if the schedule can't go on.
    """
    pending = [list(actions) for actions in program.schedule]
    clock = [0.0] * len(pending)
    sent: dict[tuple[int, int, str, int | None], float] = {}
    spans: list[list[Span]] = [[] for _ in pending]
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(pending):
            while actions and (ready := _ready(program, actions[0], sent)) is not None:
                action = actions.pop(0)
                moved = True
                start = max(clock[stage], ready)
                clock[stage] = end = start + durations.get(action.kind, 0.0)
                if action.kind in durations:
                    spans[stage].append(Span(action=action, start=start, end=end))
                if action.kind.startswith("SEND"):
                    sent.update(
                        {(stage, peer, action.kind[-1], action.microbatch): end for peer in _peers(program, action)}
                    )
    if any(pending):
        raise InternalError(f"the schedule waits for ever at {', '.join(str(left[0]) for left in pending if left)}")
    return tuple(map(tuple, spans))


def bubble(spans: tuple[tuple[Span, ...], ...]) -> float:
    """The share of the step in which a stage computes nothing, on average."""
    length = max((span.end for line in spans for span in line), default=0.0)
    busy = sum(span.end - span.start for line in spans for span in line)
    return 1 - busy / (length * len(spans)) if length else 0.0


def _peers(program: Program, action: Action) -> list[int]:
    """The stages an action sends to, or receives from."""
    forward = action.kind.endswith("_F")
    leaving = action.kind.startswith("SEND") == forward
    found = set()
    for transfer in program.transfers:
        mine, other = (transfer.source, transfer.target) if leaving else (transfer.target, transfer.source)
        if mine == action.stage and (forward or transfer.gradient):
            found.add(other)
    return sorted(found)


def _ready(program: Program, action: Action, sent: Mapping[tuple[int, int, str, int | None], float]) -> float | None:
    """From when an action can run; None while it waits for what has not been sent."""
    if not action.kind.startswith("RECV"):
        return 0.0
    times = [sent.get((peer, action.stage, action.kind[-1], action.microbatch)) for peer in _peers(program, action)]
    return None if None in times else max((time for time in times if time is not None), default=0.0)
