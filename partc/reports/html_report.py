"""The page that `partc inspect --html` writes: a summary, schedule, memory, mesh, calls, graphs and parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partc.cost.accounting import communication
from partc.cost.memory import Account
from partc.cost.simulation import Timeline, timeline
from partc.ir.mesh import PIPELINE_AXIS, Mesh
from partc.ir.printer import readable
from partc.ir.program import Call, Parameter, Program
from partc.quoting import environment
from partc.rehearsal.rehearsal import rehearsed
from partc.reports.drawing import bars, draw
from partc.reports.memory_chart import stacked
from partc.reports.schedule_comparison import candidates, figures
from partc.runtime.optimizer.recipe import DEFAULT

MOST_RANKS = 64  # the largest mesh whose ranks are drawn; a larger mesh is drawn by its axes
MOST_NAMES = 4  # the most ranks of a group that are listed
MOST_MICROBATCHES = 64
MOST_BARS = 6000  # of all schedules together; with more, only figures are shown


@dataclass(slots=True)
class Branch:
    """A part of the model's module tree: branches by name, and the calls at this level."""

    name: str
    branches: dict[str, Branch] = field(default_factory=dict)
    calls: list[list[Call]] = field(default_factory=list)  # neighbouring calls of one region and stage are in one list


def page(program: Program, *, optimizer: str = DEFAULT, groups: Sequence[str] = ()) -> str:
    """The page's text, which needs no other file and no network. Names from the model are escaped."""
    step = timeline(program)
    account, kinds = _memory(program, optimizer, groups)
    return (
        environment(markup=True)
        .get_template("report.html.jinja")
        .render(
            program=program,
            facts=_facts(program, step, account),
            tree=_tree(program),
            graphs=_graphs(program),
            groups=_ranks(program) if program.mesh.size <= MOST_RANKS else {},
            axes=_axes(program.mesh),
            parameters=_parameters(program),
            first=_first_shown(program),
            lines=_lines(program, step) if program.microbatches <= MOST_MICROBATCHES else (),
            bubble=f"{step.bubble:.0%}",
            most_microbatches=MOST_MICROBATCHES,
            schedules=_schedules(program),
            memory=stacked(account, kinds),
            peaks=_peaks(program, account),
        )
    )


def _facts(program: Program, step: Timeline, account: Account) -> list[tuple[str, str]]:
    """The summary at the head of the page: the step, memory and communication first."""
    held = sum(math.prod(parameter.type.shape) for parameter in program.parameters if parameter.trainable)
    moved = [f"{readable(size)} over {axis}" for axis, size in communication(program).items() if size]
    least = min(rank.peak for rank in account.ranks)
    most = readable(account.worst.peak)
    return [
        ("mesh", f"{program.mesh}: {program.mesh.size:,} ranks"),
        ("step", f"{program.microbatches} microbatches on {program.stages} stages, {step.bubble:.0%} idle"),
        ("memory of a rank", most if least == account.worst.peak else f"{readable(least)} to {most}, by stage"),
        ("a rank receives in a step", ", ".join(moved) or "nothing"),
        ("parameters", f"{held:,}"),
        ("regions", ", ".join(region.name for region in program.regions)),
    ]


def _tree(program: Program) -> Branch:
    """The calls by module. Consecutive calls of one region and stage are folded."""
    root = Branch(program.name)
    for call in program.calls:
        place = root
        for part in call.name.split(".")[:-1]:
            place = place.branches.setdefault(part, Branch(part))
        last = place.calls[-1][-1] if place.calls else None
        if last is not None and (last.region, last.stage) == (call.region, call.stage):
            place.calls[-1].append(call)
        else:
            place.calls.append([call])
    return root


def _parameters(program: Program) -> list[Mapping[str, Any]]:
    """The parameters. Those whose names differ only in numbers are folded."""
    found: dict[tuple[object, ...], list[Parameter]] = {}
    for parameter in program.parameters:
        key = (re.sub(r"\d+", "*", parameter.name), str(parameter.type), parameter.reduce, parameter.trainable)
        found.setdefault((*key, parameter.name if parameter.aliases else ""), []).append(parameter)
    return [
        {"name": each[0].name if len(each) == 1 else key[0], "first": each[0], "all": each}
        for key, each in found.items()
    ]


def _peaks(program: Program, account: Account) -> list[Mapping[str, Any]]:
    """The peak of each pipeline coordinate, as a share of the highest."""
    return [
        {
            "label": _stage_words(program, rank.place),
            "size": readable(rank.peak),
            "share": 100 * rank.peak / account.worst.peak,
        }
        for rank in account.ranks
    ]


def _graphs(program: Program) -> list[Mapping[str, Any]]:
    """The drawn graphs of every region."""
    found: list[Mapping[str, Any]] = []
    for region in program.regions:
        titles = ("forward", "backward" if region.weight is None else "backward, inputs", "backward, weights")
        for title, graph in zip(titles, region.graphs, strict=False):
            drawing = draw(region, graph, program.sizes)
            found.append({"region": region.name, "title": title, "phase": region.phase, "drawing": drawing})
    return found


def _first_shown(program: Program) -> int:
    """The position of the graph that is shown first: the region with the most operations over all its calls."""
    titles = [region.name for region in program.regions for graph in region.graphs]
    work = {r.name: len(r.forward.ops) * len(program.calls_to(r.name)) for r in program.regions}
    return titles.index(max(work, key=lambda name: work[name]))


def _lines(program: Program, step: Timeline) -> list[Mapping[str, Any]]:
    """The timeline of each pipeline coordinate, which all its ranks share."""
    mesh = program.mesh
    others = tuple(name for name in mesh.names if name != PIPELINE_AXIS)
    return [
        {
            "label": f"{_stage_words(program, place)}: {_named(mesh.group(mesh.rank({PIPELINE_AXIS: place}), others))}",
            "bars": line,
        }
        for place, line in enumerate(bars(step, step.makespan))
    ]


def _named(ranks: Sequence[int]) -> str:
    few = len(ranks) <= MOST_NAMES
    return ", ".join(map(str, ranks)) if few else f"{ranks[0]}, {ranks[1]} … {ranks[-1]}"


def _schedules(program: Program) -> list[Mapping[str, Any]]:
    """Every schedule on equal ranks, all at the same scale."""
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


def _stage_words(program: Program, place: int) -> str:
    """The stages of a pipeline coordinate, in words."""
    stages = program.stages_at(place)
    return f"stage{'' if len(stages) == 1 else 's'} {', '.join(map(str, stages))}"


def _axes(mesh: Mesh) -> list[Mapping[str, Any]]:
    """Each axis with the group of rank 0, slowest axis first."""
    found: list[Mapping[str, Any]] = []
    stride = mesh.size
    for name, size in mesh.axes:
        stride //= size
        group = _named(mesh.group(0, (name,)))
        found.append({"name": name, "size": size, "stride": stride, "groups": mesh.size // size, "first": group})
    return found


def _ranks(program: Program) -> Mapping[str, list[list[tuple[int, str]]]]:
    """For each pipeline coordinate, its ranks in a grid, with the mesh's last axis along rows."""
    mesh = program.mesh
    last = mesh.axes[-1] if mesh.axes[-1][0] != PIPELINE_AXIS else ("", 1)
    groups: dict[str, list[list[tuple[int, str]]]] = {}
    for rank in range(mesh.size):
        place = mesh.coordinate(rank)
        rows = groups.setdefault(_stage_words(program, place.get(PIPELINE_AXIS, 0)), [])
        if not rows or len(rows[-1]) == last[1]:
            rows.append([])
        rows[-1].append((rank, " ".join(f"{axis}={index}" for axis, index in place.items())))
    return groups
