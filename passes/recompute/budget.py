"""Save as much as a memory budget of every pipeline rank allows, so that recomputation takes the least time.

    stage 0: blocks.0 to blocks.3 of block        ->    blocks.0 of block_2, which saves less
    (two microbatches in flight, 18 GB)                 blocks.1 to blocks.3 of block

The choice has two steps. Each region has a frontier: the choices that no other choice beats in both bytes and time.
Each rank assigns points of the frontiers to its calls, so that its memory fits at all times of the step, in the least
time. Both are exact, but a frontier of a large region has only some of its points (`frontier`), of which a rank with
many stages uses only some (`MOST_COLUMNS`). A stage uses at most two points for the calls of a region: two bodies to
read, two loops. The calls that save least come first: their backward passes, which need the most temporary memory, run
when others have released their saved values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partc.cost.saved_tensors import Flight, Slot, Time
from partc.errors import InternalError
from partc.ir.naming import unique
from partc.ir.program import Call, Program, Region
from partc.passes.recompute.choice import Point
from partc.sharding.integer_program import LinearConstraints, solve_integer_program

MOST_POINTS = 2  # the most points that a stage uses for a region
FINEST = 10**8  # numbers up to which the solver is exact
MOST_COLUMNS, FEWEST_POINTS = 128, 8  # points of all slots, and of each: of longer frontiers, points at equal distances
Dealt = dict[Slot, dict[int, int]]  # slot -> index on the frontier -> number of calls there, in order of calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One moment of a step, as a constraint. For each slot, it has the number of microbatches that have saved all
    values; one more microbatch is running in the slot `inside`.

    The running microbatch has saved all values of the slots in `before`. `besides` is the other memory, for each point
    of the frontier or one number for all. If `given` has points, the row applies only if calls take these.
    """

    weights: tuple[int, ...]
    inside: int | None = None
    before: tuple[int, ...] = ()
    besides: tuple[int, ...] = (0,)
    given: tuple[frozenset[int], ...] = ()

    def live_copies(self, slot: int, index: int, point: int) -> int:
        """The number of copies of one call's saved tensors (frontier `index`) that are live while the current call is
        at `point`.
        """
        further = slot in self.before or (slot == self.inside and index >= point)
        return self.weights[slot] + further


def assign_points(
    program: Program, frontiers: Mapping[str, Sequence[Point]], times: Sequence[Sequence[Time]], budget: int
) -> Dealt:
    """The points that the calls of every stage take; `times` holds the moments of each pipeline rank.

    If nothing fits, the choice that comes closest.
    """
    counts = slots(program, frontiers)
    found: Dealt = {}
    known: dict[object, list[dict[int, int]]] = {}  # ranks with equal constraints have the same solution
    for rank, each in enumerate(times):
        mine = [slot for slot in counts if program.place(slot[0]) == rank]
        rows = tuple(_rows(program, each, mine, frontiers))
        key = (tuple((slot[1], counts[slot]) for slot in mine), rows)
        if key not in known:
            known[key] = solve([frontiers[slot[1]] for slot in mine], [counts[slot] for slot in mine], rows, budget)
        found.update(zip(mine, known[key], strict=True))
    return found


def slots(program: Program, frontiers: Collection[str]) -> dict[Slot, int]:
    """The number of calls of each region in each stage, in order of the first call."""
    counts: dict[Slot, int] = {}
    for call in program.calls:
        if call.region in frontiers:
            counts[call.stage, call.region] = counts.get((call.stage, call.region), 0) + 1
    return counts


def _rows(
    program: Program, times: Sequence[Time], slots: Sequence[Slot], frontiers: Mapping[str, Sequence[Point]]
) -> Iterator[Row]:
    """The constraints of a rank: one for all equal moments, and one for each that depends on given points."""
    alike: dict[tuple[Flight, Slot | None], list[Time]] = {}
    for time in times:
        alike.setdefault((time.flight, time.inside and time.inside[0]), []).append(time)
    place = {
        (slot, point.bytes): (number, index)
        for number, slot in enumerate(slots)
        for index, point in enumerate(frontiers[slot[1]])
    }
    for (flight, inside), found in alike.items():
        least = min(time.besides for time in found)
        sizes = [0] if inside is None else [point.bytes for point in frontiers[inside[1]]]
        row = Row(
            weights=tuple(dict(flight).get(stage, 0) for stage, _ in slots),
            inside=None if inside is None else slots.index(inside),
            before=() if inside is None else tuple(_before(program, slots, inside)),
        )
        for time in found:
            index = 0 if time.inside is None else place[time.inside][1]
            if time.given and time.besides > least:
                given = [place[each] for each in time.given]
                yield replace(
                    row,
                    besides=tuple(time.besides if index == other else least for other in range(len(sizes))),
                    given=tuple(frozenset(i for s, i in given if s == number) for number in range(len(slots))),
                )
        always: dict[int, int] = {}
        for time in found:
            if not time.given:
                size = 0 if time.inside is None else time.inside[1]
                always[size] = max(time.besides, always.get(size, 0))
        known = sorted(always)
        besides = np.interp(sizes, known, [always[size] for size in known]) if known else [least] * len(sizes)
        yield replace(row, besides=tuple(map(int, besides)))


def _before(program: Program, slots: Sequence[Slot], inside: Slot) -> Iterator[int]:
    """The slots with calls before the last call of a slot."""
    order = [(call.stage, call.region) for call in program.calls]
    last = len(order) - 1 - order[::-1].index(inside)
    for index, slot in enumerate(slots):
        if slot[0] == inside[0] and slot != inside and order.index(slot) < last:
            yield index


def peak(frontiers: Sequence[Sequence[Point]], dealt: Sequence[Mapping[int, int]], rows: Sequence[Row]) -> int:
    """The largest number of bytes at any of the moments."""
    return max((size for row in rows for size in _sizes(frontiers, dealt, row)), default=0)


def _sizes(frontiers: Sequence[Sequence[Point]], dealt: Sequence[Mapping[int, int]], row: Row) -> list[int]:
    if row.given and row.given != tuple(frozenset(taken) for taken in dealt):
        return []
    points = [0] if row.inside is None else list(dealt[row.inside])
    return [
        row.besides[point]
        + sum(
            row.live_copies(slot, index, point) * number * frontiers[slot][index].bytes
            for slot, taken in enumerate(dealt)
            for index, number in taken.items()
        )
        for point in points
    ]


def solve(
    frontiers: Sequence[Sequence[Point]], counts: Sequence[int], rows: Sequence[Row], budget: int
) -> list[dict[int, int]]:
    """For each slot, the number of its calls at each point of its frontier, in order of calls.

    The total effort is minimal among the choices in which no row exceeds the budget. If there is none, the largest row
    is minimal.
    """
    if not frontiers:
        return []
    problem = _BudgetProgram(frontiers, counts, rows)
    room = budget
    while (dealt := problem.quickest(room)) is not None:
        more = peak(frontiers, dealt, rows) - budget
        if more <= 0:
            return dealt
        room -= more  # the solver is not exact beyond its limit
    return problem.lowest()


class _BudgetProgram:
    """The integer program: columns are the number of calls at each point of each slot, and whether it is positive."""

    def __init__(self, frontiers: Sequence[Sequence[Point]], counts: Sequence[int], rows: Sequence[Row]) -> None:
        most = max(FEWEST_POINTS, MOST_COLUMNS // len(frontiers))
        self.columns = [(slot, index) for slot, points in enumerate(frontiers) for index in _spread(points, most)]
        self.frontiers, self.slots = frontiers, len(counts)
        self.upper = np.array([*(counts[slot] for slot, _ in self.columns), *(1 for _ in self.columns)], dtype=float)
        largest = max((_largest(frontiers, counts, row) for row in rows), default=0)
        self.unit = -(-largest // FINEST) or 1
        self.most = largest // self.unit + len(self.upper)
        self.lines = [*self._dealing(counts)]  # (coefficients, bounds of their sum)
        self.limits = [limit for row in rows for limit in self._limits(row)]  # (coefficients, other memory)

    def _dealing(self, counts: Sequence[int]) -> Iterator[tuple[Any, float, float]]:
        size = len(self.columns)
        for slot, count in enumerate(counts):
            mine = np.array([float(other == slot) for other, _ in self.columns])
            yield np.concatenate([mine, np.zeros(size)]), count, count
            yield np.concatenate([np.zeros(size), mine]), 0, MOST_POINTS
        for column in range(size):
            used = np.zeros(2 * size)
            used[column], used[size + column] = 1, -self.upper[column]
            yield used, -np.inf, 0
            used = np.zeros(2 * size)
            used[column], used[size + column] = -1, 1
            yield used, -np.inf, 0

    def _limits(self, row: Row) -> Iterator[tuple[Any, int]]:
        size = len(self.columns)
        if any((slot, index) not in self.columns for slot, each in enumerate(row.given) for index in each):
            return  # a choice that is left out
        points = [0] if row.inside is None else [index for slot, index in self.columns if slot == row.inside]
        for point in points:
            if row.given and row.inside is not None and point not in row.given[row.inside]:
                continue
            besides = -(-row.besides[point] // self.unit)
            line = np.zeros(2 * size)
            for column, (slot, index) in enumerate(self.columns):
                line[column] = -(-row.live_copies(slot, index, point) * self.frontiers[slot][index].bytes // self.unit)
            if row.given:  # the row is relaxed by this amount for every other point
                taken = [index in row.given[slot] for slot, index in self.columns]
                line[size:] = [besides if each else -besides for each in taken]
                yield line, -besides * (sum(taken) - 1)
            elif row.inside is None:
                yield line, besides
            else:
                line[size + self.columns.index((row.inside, point))] = besides
                yield line, 0

    def quickest(self, room: int) -> list[dict[int, int]] | None:
        """The choice of least effort in which no row exceeds `room`; None if there is none."""
        if room < 0:
            return None
        efforts = [self.frontiers[slot][index].effort for slot, index in self.columns]
        prices = np.array([*efforts, *(0 for _ in efforts)]) / (math.gcd(*efforts) or 1)
        held = [(line, -np.inf, room // self.unit - besides + 0.5) for line, besides in self.limits]
        return self._solved(prices, [*self.lines, *held], self.upper)

    def lowest(self) -> list[dict[int, int]]:
        """The choice with the smallest largest row."""
        rows = [(np.append(line, 0.0), lower, upper) for line, lower, upper in self.lines]
        rows += [(np.append(line, -1.0), -np.inf, -besides + 0.5) for line, besides in self.limits]
        prices = np.append(np.zeros(len(self.upper)), 1.0)
        found = self._solved(prices, rows, np.append(self.upper, self.most))
        if found is None:
            raise InternalError("no choice of saved values")
        return found

    def _solved(self, prices: Any, rows: Sequence[tuple[Any, float, float]], upper: Any) -> list[dict[int, int]] | None:
        matrix, lower, most = (np.array(each) for each in zip(*rows, strict=True))
        found = solve_integer_program(
            prices,
            [LinearConstraints.dense(matrix, lower, most)],
            integral=np.ones(len(upper)),
            upper=upper,
            options={"mip_rel_gap": 0.0},
        ).values
        if found is None:
            return None
        dealt: list[dict[int, int]] = [{} for _ in range(self.slots)]
        numbers = np.rint(found[: len(self.columns)]).astype(int)
        for (slot, index), number in reversed(list(zip(self.columns, numbers, strict=True))):
            if number:
                dealt[slot][index] = int(number)
        return dealt


def _spread(points: Sequence[Point], most: int) -> list[int]:
    """The indices of at most this many points of a frontier: the ends, and those nearest to equal steps of bytes."""
    if len(points) <= most:
        return list(range(len(points)))
    steps = np.linspace(points[0].bytes, points[-1].bytes, most)
    return sorted({int(np.argmin([abs(point.bytes - step) for point in points])) for step in steps})


def _largest(frontiers: Sequence[Sequence[Point]], counts: Sequence[int], row: Row) -> int:
    """An upper bound on a row's value."""
    saved = sum(
        (1 + weight) * count * points[0].bytes
        for weight, count, points in zip(row.weights, counts, frontiers, strict=True)
    )
    return max(row.besides) + saved


@dataclass(slots=True)
class _Variants:
    """The bodies of one region, by frontier point; the first has the region's name."""

    region: Region
    names: dict[int, str]


def with_points(program: Program, dealt: Dealt, make: Callable[[Region, int], Region]) -> Program:
    """The program whose calls take the assigned points; `make(region, point)` returns a region's body."""
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
        for index, name in names.items():
            made = make(region, index)
            regions.append(made if made.name == name else replace(made, name=name))
        if not names:
            regions.append(region)
    return replace(program, calls=tuple(calls), regions=tuple(regions))
