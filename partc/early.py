"""Which actions gather ahead for the ones after them: those for which no rank holds more at any time (ZeRO 3).

What an action reads first can be gathered while the last call of the one before it runs. Then both are there for the
rest of that: for calls that read nothing in parts but make gradients of much (an embedding's), and for actions that
gather nothing (gradients of weights, made apart). Whether that is where a rank holds most, a rehearsal says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from partc.mesh import PIPELINE_AXIS
from partc.parts import Parts
from partc.program import Program
from partc.rehearsal import peaks


def early(program: Program) -> tuple[str, ...]:
    """Stages and kinds of actions (`0B`) of a scheduled program. All of a rank's, or one after the other what fits."""
    places = [_gathering(program, place) for place in range(program.mesh.axis(PIPELINE_AXIS))]
    if not any(places):
        return ()
    most = _peaks(program, ())
    found = _peaks(program, [action for actions in places for action in actions])
    chosen = [actions if peak <= limit else [] for actions, peak, limit in zip(places, found, most, strict=True)]
    rest = [[] if peak <= limit else actions for actions, peak, limit in zip(places, found, most, strict=True)]
    for candidates in zip_longest(*rest):
        tried = [[*here, *([new] if new else [])] for here, new in zip(chosen, candidates, strict=True)]
        found = _peaks(program, [action for actions in tried for action in actions])
        chosen = [
            more if peak <= limit else here for here, more, peak, limit in zip(chosen, tried, found, most, strict=True)
        ]
    return tuple(action for actions in chosen for action in actions)


def _peaks(program: Program, early: Sequence[str]) -> list[int]:
    return peaks(replace(program, early=tuple(early)))


def _gathering(program: Program, place: int) -> list[str]:
    """The actions of a pipeline coordinate that gather something."""
    parts = Parts(program)
    kinds = dict.fromkeys((action.stage, action.kind) for action in program.schedule[place])
    return [
        f"{stage}{kind}"
        for stage, kind in kinds
        if kind in ("F", "B", "I", "W")
        and any(parts.gathers(call, run) for run, calls in parts.runs(stage, kind) for call in calls)
    ]
