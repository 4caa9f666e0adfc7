"""Late actions: actions that gather nothing ahead, since this would raise their rank's peak memory.

An action can start the next action's first gather while its last call runs. The parameters of both calls are then in
memory until the action ends, possibly together with large gradients (an embedding's). Rehearsals show whether this
raises the peak: one with everything ahead is enough if every rank peaks elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.program import Program
from partc.passes.prefetch import gathers, prefetch
from partc.rehearsal.composition import Course
from partc.rehearsal.ledger import Ledger
from partc.rehearsal.rehearsal import KnownSteps, Steps, steps


@dataclass(frozen=True, slots=True)
class LateActions:
    """The names of late actions (`0B`), and the steps of the programs that were compared to find them."""

    names: frozenset[str]
    compared: KnownSteps = ()


@dataclass(slots=True)
class _Rank:
    """The search for late actions at one pipeline coordinate."""

    limit: int  # the peak if nothing is gathered ahead
    early: set[str]  # actions whose gathers ahead do not raise the peak
    left: list[str]  # actions to be tried


def gathering_actions(program: Program) -> frozenset[str]:
    """The names of all actions that gather something (`0B`), in a program before the pass `prefetch`."""
    places = range(program.mesh.axis(PIPELINE_AXIS))
    return frozenset(name for place in places for name in _gathering(program, place))


def late_actions(program: Program) -> LateActions:
    """The late actions of a program before the pass `prefetch`: none if no peak rises, else found one by one."""
    places = [_gathering(program, place) for place in range(program.mesh.axis(PIPELINE_AXIS))]
    every = gathering_actions(program)
    if not every:
        return LateActions(every)
    ahead, courses = everything = _with_steps(program, frozenset())
    if all(_peaks_before(ahead, place, course) for place, course in enumerate(courses)):
        return LateActions(frozenset(), (everything,))
    compared = [everything, _with_steps(program, every)]
    ranks: list[_Rank] = []
    for names, peak, limit in zip(places, *map(_peaks, compared), strict=True):
        ranks.append(_Rank(limit, early={*names}, left=[]) if peak <= limit else _Rank(limit, early=set(), left=names))
    while any(rank.left for rank in ranks):
        tried = {name for rank in ranks for name in (*rank.early, *rank.left[:1])}
        compared.append(_with_steps(program, every - tried))
        for rank, peak in zip(ranks, _peaks(compared[-1]), strict=True):
            if peak <= rank.limit:
                rank.early.update(rank.left[:1])
            rank.left = rank.left[1:]
    return LateActions(every.difference(*(rank.early for rank in ranks)), tuple(compared))


def _peaks_before(program: Program, place: int, step: Course | Ledger) -> bool:
    """Whether a rank peaks in a call before its action starts gathers of the next one. It would hold as much there if
    nothing were gathered ahead.
    """
    at = step.rank(place, program.stages_at(place), 0).at
    kind = re.match(r"[0-9]+[FBIW]", at.action)
    body = program.named_bodies.get(kind[0]) if kind else None
    if body is None or not gathers(body.statements):
        return False
    starts = [index for index, each in enumerate(body.statements) if each.ahead]
    runs = [index for index, each in enumerate(body.statements) if (each.verb, each.of) == ("run", at.call)]
    return bool(runs) and max(runs) < min(starts, default=0)


def _with_steps(program: Program, late: frozenset[str]) -> tuple[Program, Steps]:
    """The program with these late actions, and its steps."""
    ahead = prefetch(program, late=late)
    return ahead, steps(ahead)


def _peaks(compared: tuple[Program, Steps]) -> list[int]:
    return [course.peak for course in compared[1]]


def _gathering(program: Program, place: int) -> list[str]:
    """The actions of a pipeline coordinate that gather something."""
    bodies = {body.name for body in program.bodies if gathers(body.statements)}
    names = dict.fromkeys(f"{action.stage}{action.kind}" for action in program.schedule[place])
    return [name for name in names if name in bodies]
