"""Modules of pipeline coordinates: the stages, groups, links and schedule that their ranks share."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from partc.communication.exchanges import Exchanges
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.program import Program
from partc.quoting import literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceCode:
    """The fields of the template of a coordinate's module."""

    place: int
    ranks: str
    title: str
    mesh: str
    stages: str
    groups: str
    links: str
    schedule: tuple[str, ...]
    evaluation: tuple[str, ...]  # the schedule of an evaluation; empty without one


def place_codes(program: Program, evaluation: Program | None = None) -> Iterator[PlaceCode]:
    """The code of every pipeline coordinate. A rank derives its own coordinate, groups and links (runtime/place.py)."""
    mesh, exchanges = program.mesh, program.derived(Exchanges)
    places = mesh.axis(PIPELINE_AXIS)
    for place in range(places):
        stages = program.stages_at(place)
        sums = [exchanges.sums(stage) for stage in stages]
        axes = dict.fromkeys(",".join(group) for each in sums for group in each.groups())
        shared = dict.fromkeys(held for each in sums for held in each.shared())
        groups = (*axes, *(f"{PIPELINE_AXIS} {','.join(map(str, held))}" for held in shared))
        links = ", ".join(f"{link}: {other}" for link, other in _links(program, evaluation, place))
        yield PlaceCode(
            place=place,
            ranks=f"Ranks at {PIPELINE_AXIS}={place}" if places > 1 else "All ranks",
            title=f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}",
            mesh=str(mesh),
            stages=str(stages),
            groups=_tuple(map(literal, groups)),
            links=f"{{{links}}}",
            schedule=_schedule(program, place),
            evaluation=() if evaluation is None else _schedule(evaluation, place),
        )


def _tuple(items: Iterable[str]) -> str:
    found = [*items]
    return f"({', '.join(found)}{',' * (len(found) == 1)})" if found else ""


def _links(program: Program, evaluation: Program | None, index: int) -> tuple[tuple[tuple[int, int], int], ...]:
    """The links of a pipeline coordinate: (from stage, to stage), and the coordinate of the other end.

    An evaluation may send values between stages that exchange none in the training.
    """
    ends = {(t.source, t.target) for t in program.sent}
    ends |= {(t.target, t.source) for t in program.sent if t.gradient}
    ends |= set() if evaluation is None else {(t.source, t.target) for t in evaluation.sent}
    places = {(a, b): (program.place(a), program.place(b)) for a, b in sorted(ends)}
    return tuple((link, b if a == index else a) for link, (a, b) in places.items() if index in (a, b))


def _schedule(program: Program, index: int) -> tuple[str, ...]:
    """The actions as text in lines of readable length; all but the last end with a space."""
    actions = " ".join(map(str, program.schedule[index])) if program.schedule else ""
    lines = textwrap.wrap(actions, 100)
    return tuple(f"{line} " for line in lines[:-1]) + tuple(lines[-1:])
