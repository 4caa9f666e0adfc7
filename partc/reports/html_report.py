"""The page that `partc inspect --html` writes: calls, graphs, mesh, schedule and parameters, in one file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partc.cost.accounting import communication
from partc.cost.memory import Account
from partc.cost.simulation import Timeline, timeline
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.printer import readable
from partc.ir.program import Call, Program
from partc.quoting import environment
from partc.rehearsal.rehearsal import rehearsed
from partc.reports.drawing import bars, draw
from partc.reports.memory_chart import stacked
from partc.reports.schedule_comparison import candidates, figures
from partc.runtime.optimizer.recipe import DEFAULT

MOST_RANKS = 512  # that are drawn; a larger mesh says how many are not
MOST_MICROBATCHES = 64
MOST_BARS = 6000  # of all schedules together; with more only their figures are shown


@dataclass(slots=True)
class Branch:
    """A part of the model's module tree: branches by name, and the calls at this level."""

    name: str
    branches: dict[str, Branch] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)


def write_html(program: Program, path: Path) -> None:
    """Write the page of a compiled program. It needs no other file and no network."""
    path.write_text(page(program), encoding="utf-8")


def page(program: Program, *, optimizer: str = DEFAULT, groups: Sequence[str] = ()) -> str:
    """The page's text. Names from the model are escaped."""
    step = timeline(program)
    return (
        environment(markup=True)
        .get_template("report.html.jinja")
        .render(
            program=program,
            facts=_facts(program),
            tree=_tree(program),
            graphs=_graphs(program),
            mesh=_mesh(program),
            first=_first(program),
            lines=_lines(program, step) if program.microbatches <= MOST_MICROBATCHES else (),
            bubble=f"{step.bubble:.0%}",
            most_microbatches=MOST_MICROBATCHES,
            schedules=_schedules(program),
            memory=stacked(*_memory(program, optimizer, groups)),
        )
    )


def _facts(program: Program) -> list[tuple[str, str]]:
    """The facts at the head of the page."""
    held = sum(math.prod(parameter.type.shape) for parameter in program.parameters if parameter.trainable)
    moved = [f"{readable(size)} over {axis}" for axis, size in communication(program).items() if size]
    return [
        ("mesh", f"{program.mesh}: {program.mesh.size:,} ranks"),
        ("microbatches", str(program.microbatches)),
        ("stages", str(program.stages)),
        ("regions", ", ".join(region.name for region in program.regions)),
        ("parameters", f"{held:,}"),
        ("each rank receives a step", ", ".join(moved) or "nothing"),
    ]


def _tree(program: Program) -> Branch:
    root = Branch(program.name)
    for call in program.calls:
        place = root
        for part in call.name.split(".")[:-1]:
            place = place.branches.setdefault(part, Branch(part))
        place.calls.append(call)
    return root


def _graphs(program: Program) -> list[Mapping[str, Any]]:
    """Every region's graphs, drawn."""
    found: list[Mapping[str, Any]] = []
    for region in program.regions:
        titles = ("forward", "backward" if region.weight is None else "backward, inputs", "backward, weights")
        for title, graph in zip(titles, region.graphs, strict=False):
            drawing = draw(region, graph, program.sizes)
            found.append({"region": region.name, "title": title, "phase": region.phase, "drawing": drawing})
    return found


def _first(program: Program) -> int:
    """The graph shown first: the body with the most operations in all its calls."""
    titles = [region.name for region in program.regions for graph in region.graphs]
    work = {r.name: len(r.forward.ops) * sum(call.region == r.name for call in program.calls) for r in program.regions}
    return titles.index(max(work, key=lambda name: work[name]))


def _lines(program: Program, step: Timeline) -> list[Mapping[str, Any]]:
    """The timeline of each pipeline coordinate, common to its ranks."""
    found: list[Mapping[str, Any]] = []
    for place, line in enumerate(bars(step, step.makespan)):
        ranks = [r for r in range(program.mesh.size) if program.mesh.coordinate(r).get(PIPELINE_AXIS, 0) == place]
        few = ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]} … {ranks[-1]}"
        found.append({"label": f"{_held(program, place)}: {few}", "bars": line})
    return found


def _schedules(program: Program) -> list[Mapping[str, Any]]:
    """Every schedule on equal ranks, all at one scale."""
    ranks = program.mesh.axis(PIPELINE_AXIS)
    each = program.stages // ranks
    found = candidates(ranks, program.microbatches, virtual_stages=each if each > 1 else None)
    longest = max(item.timeline.makespan for item in found)
    drawn = sum(len(line) for item in found for line in item.timeline.ranks) <= MOST_BARS
    return [
        {"schedule": item, "figures": figures(item), "lines": bars(item.timeline, longest) if drawn else ()}
        for item in found
    ]


def _memory(
    program: Program, optimizer: str, groups: Sequence[str]
) -> tuple[Account, Sequence[tuple[str, Mapping[str, int]]]]:
    """The memory account, and the categories of each action of the rank with the highest peak."""
    account, ledgers = rehearsed(program, optimizer=optimizer, groups=groups)
    return account, list(ledgers[account.worst.place].kinds())


def _held(program: Program, place: int) -> str:
    """The stages of a pipeline coordinate, in words."""
    stages = program.stages_at(place)
    return f"stage{'' if len(stages) == 1 else 's'} {', '.join(map(str, stages))}"


def _mesh(program: Program) -> Mapping[str, Any]:
    """Ranks in a grid for each pipeline coordinate: the last axis along rows."""
    mesh = program.mesh
    last = mesh.axes[-1] if mesh.axes[-1][0] != PIPELINE_AXIS else ("", 1)
    groups: dict[str, list[list[tuple[int, str]]]] = {}
    for rank in range(min(mesh.size, MOST_RANKS)):
        place = mesh.coordinate(rank)
        rows = groups.setdefault(_held(program, place.get(PIPELINE_AXIS, 0)), [])
        if not rows or len(rows[-1]) == last[1]:
            rows.append([])
        rows[-1].append((rank, " ".join(f"{axis}={index}" for axis, index in place.items())))
    return {"groups": groups, "along": last[0], "hidden": max(0, mesh.size - MOST_RANKS)}
