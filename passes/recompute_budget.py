"""Save as much as a budget of every pipeline rank allows, so that recomputation takes the least time.

    stage 0: blocks.0 to blocks.3 of block        ->    blocks.0 to blocks.2 of block
    (two microbatches in flight, 18 GB)                 blocks.3 of block_2, which saves less

Exact, in two steps. Each region has its frontier: the choices that no other beats both in bytes and
in time. Each rank deals points of the frontiers to its calls, so that the microbatches in flight
fit whenever the schedule has most of them, and the time is least. One stage takes at most two
points for calls of one region: two bodies to read, two loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partc.errors import InternalError, PartcError
from partc.naming import unique
from partc.passes.recompute_choice import Point
from partc.printer import readable
from partc.program import Call, Program, Region
from partc.saving import Flight

MOST_POINTS = 2  # of one region in one stage
Slot = tuple[int, str]  # a stage and a region that it calls
Dealt = dict[Slot, dict[int, int]]  # how many calls take each point, by its place on the frontier


def deal(
    program: Program,
    frontiers: Mapping[str, Sequence[Point]],
    flights: Sequence[Sequence[Flight]],
    room: Sequence[int],
    *,
    reach: bool = True,
) -> Dealt:
    """The points that the calls of every stage take; `room` has the bytes of each pipeline rank.

    Where even the points that save least are too many: raises PartcError P0415, or takes these if not `reach`.
    """
    counts: dict[Slot, int] = {}
    for call in program.calls:
        if call.region in frontiers:
            counts[call.stage, call.region] = counts.get((call.stage, call.region), 0) + 1
    least = _least(counts, frontiers, flights)
    if reach:
        _check_reach(least, room)
    room = [max(have, need) for have, need in zip(room, least, strict=True)]
    found: Dealt = {}
    known: dict[object, list[dict[int, int]]] = {}  # ranks in the same situation have the same answer
    for rank, mixes in enumerate(flights):
        slots = [slot for slot in counts if program.place(slot[0]) == rank]
        weights = tuple(tuple(dict(mix).get(stage, 0) for stage, _ in slots) for mix in mixes)
        key = (tuple((slot[1], counts[slot]) for slot in slots), weights, room[rank])
        if key not in known:
            known[key] = solve(
                [frontiers[slot[1]] for slot in slots], [counts[slot] for slot in slots], weights, room[rank]
            )
        found.update(zip(slots, known[key], strict=True))
    return found


def _least(
    counts: Mapping[Slot, int], frontiers: Mapping[str, Sequence[Point]], flights: Sequence[Sequence[Flight]]
) -> list[int]:
    """What every rank saves if all its calls take the point that saves least."""
    return [
        max(
            (
                sum(
                    dict(mix).get(stage, 0) * count * frontiers[region][-1].bytes
                    for (stage, region), count in counts.items()
                )
                for mix in mixes
            ),
            default=0,
        )
        for mixes in flights
    ]


def _check_reach(least: Sequence[int], room: Sequence[int]) -> None:
    over = [size - bytes for size, bytes in zip(least, room, strict=True)]
    if max(over, default=0) > 0:
        rank = over.index(max(over))
        raise PartcError(
            "P0415",
            f"pipeline rank {rank} saves {least[rank]:,} bytes at least for its backward passes, "
            f"{readable(over[rank])} more than it has room for",
            help=f"give --recompute {_rounded(least[rank])} or more, or smaller microbatches",
        )


def _rounded(bytes: int) -> str:
    """No fewer, as the option takes them."""
    return f"{bytes}B" if bytes < 10**7 else f"{math.ceil(bytes / 1e6)}MB"


def solve(
    frontiers: Sequence[Sequence[Point]], counts: Sequence[int], weights: Sequence[Sequence[int]], room: int
) -> list[dict[int, int]]:
    """For each slot, how many of its calls take each point of its frontier; the sum of efforts is the least.

    `weights` has a row for each mix in flight: how many microbatches of each slot's stage it holds.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    columns = [(slot, index) for slot, points in enumerate(frontiers) for index in range(len(points))]
    if not columns:
        return []
    size = len(columns)
    upper = np.array([counts[slot] for slot, _ in columns])
    rows: list[tuple[Any, float, float]] = []
    for slot, count in enumerate(counts):
        mine = np.array([float(other == slot) for other, _ in columns])
        rows.append((np.concatenate([mine, np.zeros(size)]), count, count))
        rows.append((np.concatenate([np.zeros(size), mine]), 0, MOST_POINTS))
    for column in range(size):
        used = np.zeros(2 * size)
        used[column], used[size + column] = 1, -upper[column]
        rows.append((used, -np.inf, 0))
    for mix in weights:
        held = [mix[slot] * frontiers[slot][index].bytes for slot, index in columns]
        unit = math.gcd(*held) or 1
        rows.append((np.array([*(bytes / unit for bytes in held), *([0.0] * size)]), -np.inf, room // unit + 0.5))
    efforts = [frontiers[slot][index].effort for slot, index in columns]
    found = milp(
        np.array([*efforts, *([0] * size)]) / (math.gcd(*efforts) or 1),
        constraints=LinearConstraint(
            np.array([row for row, _, _ in rows]), *zip(*[row[1:] for row in rows], strict=True)
        ),
        integrality=np.ones(2 * size),
        bounds=Bounds(0, np.array([*upper, *([1] * size)])),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise InternalError(f"no choice of what calls save: {found.message}")
    dealt: list[dict[int, int]] = [{} for _ in counts]
    for (slot, index), number in zip(columns, np.rint(found.x[:size]).astype(int), strict=True):
        if number:
            dealt[slot][index] = int(number)
    for mix in weights:
        taken = sum(
            mix[slot] * number * frontiers[slot][index].bytes
            for slot, points in enumerate(dealt)
            for index, number in points.items()
        )
        if taken > room:
            raise InternalError(f"{taken} bytes were dealt into {room}")
    return dealt


@dataclass(slots=True)
class _Variants:
    """The bodies of one region, by the point of its frontier: the first has the region's name."""

    region: Region
    names: dict[int, str]


def varied(program: Program, dealt: Dealt, make: Callable[[Region, int], Region]) -> Program:
    """The program whose calls take the points that were dealt to them; `make(region, point)` is a region's body."""
    taken = {region.name for region in program.regions}
    variants = {region.name: _Variants(region, {}) for region in program.regions}
    left = {slot: dict(points) for slot, points in dealt.items()}
    calls: list[Call] = []
    for call in program.calls:
        points = left.get((call.stage, call.region))
        if points is None:
            calls.append(call)
            continue
        index = next(iter(points))
        points[index] -= 1
        if not points[index]:
            del points[index]
        names = variants[call.region].names
        if index not in names:
            names[index] = call.region if not names else unique(call.region, taken)
        calls.append(replace(call, region=names[index]))
    regions: list[Region] = []
    for region in program.regions:
        names = variants[region.name].names
        regions.extend(replace(make(region, index), name=name) for index, name in names.items())
        if not names:
            regions.append(region)
    return replace(program, calls=tuple(calls), regions=tuple(regions))
