"""Rank modules: the literals of one rank, in few lines."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from partc.communication.exchanges import Exchanges
from partc.ir.layout import Layout
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.naming import is_number
from partc.ir.program import Program
from partc.quoting import literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCode:
    """The fields of a rank module's template."""

    rank: int
    coordinate: str
    title: str
    stages: str
    groups: tuple[tuple[str, str], ...]
    links: str
    shards: tuple[tuple[str, str], ...]
    schedule: tuple[str, ...]
    evaluation: tuple[str, ...]  # the schedule of an evaluation; empty without one


def rank_codes(program: Program, evaluation: Program | None = None) -> Iterator[RankCode]:
    """The code of every rank; the parts that ranks of a pipeline coordinate share are computed once."""
    mesh = program.mesh
    exchanges = Exchanges(program)
    pipeline = range(mesh.axis(PIPELINE_AXIS))
    hosted = [program.stages_at(index) for index in pipeline]
    sums = [[exchanges.sums(stage) for stage in stages] for stages in hosted]
    axes = [tuple(dict.fromkeys(group for stage in here for group in stage.groups())) for here in sums]
    shared = [tuple(dict.fromkeys(places for stage in here for places in stage.shared())) for here in sums]
    links = [_links(program, index) for index in pipeline]
    schedules = [_schedule(program, index) for index in pipeline]
    evaluations = [() if evaluation is None else _schedule(evaluation, index) for index in pipeline]
    patterns = [_patterns(program, stages) for stages in hosted]
    cut = lru_cache(maxsize=None)(lambda index, place: _shards(patterns[index], program, dict(place)))
    members = lru_cache(maxsize=None)(lambda first, names: _ranks(mesh.group(first, names)))
    for rank in range(mesh.size):
        place = mesh.coordinate(rank)
        index = place.get(PIPELINE_AXIS, 0)
        at = lambda other: mesh.rank({**place, PIPELINE_AXIS: other})  # noqa: B023, E731
        here = tuple((axis, index) for axis, index in place.items() if axis != PIPELINE_AXIS)
        yield RankCode(
            rank=rank,
            coordinate=_dict(place),
            title=f"stage{'s' * (len(hosted[index]) > 1)} {' and '.join(map(str, hosted[index]))}",
            stages=str(hosted[index]),
            groups=(
                *(
                    (",".join(names), members(mesh.rank({**place, **dict.fromkeys(names, 0)}), names))
                    for names in axes[index]
                ),
                *((f"pp {','.join(map(str, held))}", _ranks(tuple(map(at, held)))) for held in shared[index]),
            ),
            links=f"{{{', '.join(f'{link}: {at(other)}' for link, other in links[index])}}}",
            shards=cut(index, here),
            schedule=schedules[index],
            evaluation=evaluations[index],
        )


def _dict(items: Mapping[str, int]) -> str:
    return f"{{{', '.join(f'{literal(key)}: {value}' for key, value in items.items())}}}"


def _ranks(members: tuple[int, ...]) -> str:
    """A tuple of ranks; a long one with equal steps becomes a range."""
    steps = {b - a for a, b in itertools.pairwise(members)}
    if len(members) > 16 and len(steps) == 1:
        return f"tuple(range({members[0]}, {members[-1] + 1}, {steps.pop()}))"
    return str(members)


def _links(program: Program, index: int) -> tuple[tuple[tuple[int, int], int], ...]:
    """The links of a pipeline coordinate: (from stage, to stage), and the coordinate of the other end."""
    ends = {(t.source, t.target) for t in program.transfers if program.travels(t)}
    ends |= {(t.target, t.source) for t in program.transfers if program.travels(t) and t.gradient}
    places = {(a, b): (program.place(a), program.place(b)) for a, b in sorted(ends)}
    return tuple((link, b if a == index else a) for link, (a, b) in places.items() if index in (a, b))


def _schedule(program: Program, index: int) -> tuple[str, ...]:
    """The actions in lines of a readable length, each but the last with a space at its end."""
    actions = " ".join(map(str, program.schedule[index])) if program.schedule else ""
    lines = textwrap.wrap(actions, 100)
    return tuple(f"{line} " for line in lines[:-1]) + tuple(lines[-1:])


def _patterns(program: Program, stages: tuple[int, ...]) -> tuple[tuple[str, Layout], ...]:
    """The sharded parameters of some stages; those of repeated calls under one name with a `*`."""
    layouts = {parameter.name: parameter.type.layout for parameter in program.parameters}
    found: dict[str, Layout] = {}
    for call in program.calls:
        if call.stage not in stages:
            continue
        for name in call.params:
            if any(program.sizes[axis] > 1 for axis in layouts[name].sharded_axes):
                starred = ".".join("*" if is_number(part) else part for part in name.split("."))
                key = starred if found.get(starred, layouts[name]) == layouts[name] else name
                found[key] = layouts[name]
    return tuple(found.items())


def _shards(
    patterns: tuple[tuple[str, Layout], ...], program: Program, place: Mapping[str, int]
) -> tuple[tuple[str, str], ...]:
    return tuple((name, _ranges(layout, program, place)) for name, layout in patterns)


def _ranges(layout: Layout, program: Program, place: Mapping[str, int]) -> str:
    """The elements of each dimension that a rank holds, as Python slices: `[0:4 8:12, :]`."""
    dims: list[str] = []
    for dim in layout.dims:
        runs = [(0, 1)]
        for sub in reversed(dim):
            ways, index = 1, 0
            for axis in sub.axes:
                ways, index = ways * program.sizes[axis], index * program.sizes[axis] + place.get(axis, 0)
            runs = _nested(runs, sub.size, index * (sub.size // ways), sub.size // ways, _extent(dim, sub))
        size = layout.shape[len(dims)]
        dims.append(":" if runs == [(0, size)] else " ".join(f"{start}:{end}" for start, end in runs))
    return f"[{', '.join(dims)}]"


def _extent(dim: tuple[object, ...], sub: object) -> int:
    """The number of elements behind one step of a factor: the product of the minor factors."""
    extent = 1
    for other in reversed(dim):
        if other is sub:
            return extent
        extent *= other.size  # type: ignore[attr-defined]
    return extent


def _nested(runs: list[tuple[int, int]], size: int, first: int, count: int, extent: int) -> list[tuple[int, int]]:
    """The runs repeated for `count` steps of `extent` elements from `first`, with neighbours joined."""
    if runs == [(0, extent)]:
        return [(first * extent, (first + count) * extent)]
    return [(start + step * extent, end + step * extent) for step in range(first, first + count) for start, end in runs]
