"""The choice of saved values: exact trade-offs between memory and recomputation, as integer programs.

A binary variable says for each value whether it is saved, another for each recomputable operation whether it is
recomputed. A value that backward or a recomputed operation reads is saved or recomputed. Without a limit on memory this
is a minimum cut, and the linear relaxation is integral.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partc.errors import InternalError
from partc.sharding.integer_program import LinearConstraints, solve_integer_program

WORK = 10**6  # a frontier is complete while its points, times the square of the variables, are within this number
NODES = 1000  # the most nodes of the search for a solution; ordinary models take a few
CORNERS = 100  # the most corners of a frontier that is not complete


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingProblem:
    """The values that backward needs, the cost of saving each value, and the recomputable operations.

    `ops`, `reads` and `effort` are parallel: an operation's results, the values that it reads (except those that exist
    anyway), and the effort of recomputing it, in any unit.
    """

    needed: tuple[str, ...]
    bytes: Mapping[str, int]
    ops: tuple[tuple[str, ...], ...]
    reads: tuple[tuple[str, ...], ...]
    effort: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A choice that no other beats in both bytes and effort: the saved values, their bytes, and the effort of
    recomputing the rest.
    """

    saved: frozenset[str]
    bytes: int
    effort: int


def least_saved(choice: SavingProblem, *, worth: int) -> frozenset[str]:
    """The saved values that minimise `worth` times their bytes plus the effort of recomputing the others."""
    problem = _Constraints(choice)
    found = problem.solve(problem.effort + worth * problem.bytes)
    if found is None:
        raise InternalError("backward needs a value that is neither saved nor computed")
    return found.saved


def frontier(choice: SavingProblem) -> tuple[Point, ...]:
    """The efficient choices, from most to fewest saved bytes.

    A frontier has all of them unless its integer programs are large, since their time grows with their size. Of a
    large frontier, it has the corners of the convex hull, which are quickly found minimum cuts, and points at equal
    distances.
    """
    problem = _Constraints(choice)
    most = WORK // problem.size**2
    found = list(itertools.islice(problem.sweep(), most + 1))
    if len(found) > most:
        corners = problem.corners()
        apart = (corners[0].bytes - corners[-1].bytes) // (most + 1)
        found += [*corners, *itertools.islice(problem.sweep(apart), most)]
    return efficient(found)


def efficient(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other beats, from most to fewest bytes."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bytes, point.effort)):
        if not found or found[-1].effort > point.effort:
            found.append(point)
    return tuple(reversed(found))


def _area(gap: tuple[Point, Point]) -> int:
    """The largest gain of a point between two points, in bytes times effort."""
    first, last = gap
    return (first.bytes - last.bytes) * (last.effort - first.effort)


class _Limit:
    """A row of coefficients and the upper bound of their sum, in the solver's unit.

    Coefficients above the limit are replaced by one just above it, since the solver's tolerance is relative to the
    largest.
    """

    def __init__(self, row: Any, most: int) -> None:
        self.most = most
        self.unit = math.gcd(*map(int, row)) or 1
        self.row = np.minimum(row / self.unit, most // self.unit + 1)
        self.room = most // self.unit

    def excess(self, number: int) -> int:
        """The amount by which a sum exceeds the limit, in the solver's unit."""
        return max(0, -(-(number - self.most) // self.unit))


class _Constraints:
    """The constraints of the integer program: columns are recomputed operations, then saved values."""

    def __init__(self, choice: SavingProblem) -> None:
        self.choice = choice
        self.makers = {name: index for index, results in enumerate(choice.ops) for name in results}
        relevant = self._relevant()
        self.values = [name for name in choice.bytes if name in relevant]
        count = len(choice.ops)
        column = {name: count + index for index, name in enumerate(self.values)}
        pairs: list[tuple[str, int | None]] = [(name, None) for name in choice.needed]
        again = [index for index, results in enumerate(choice.ops) if not relevant.isdisjoint(results)]
        pairs += [(name, index) for index in again for name in choice.reads[index]]
        self.matrix = np.zeros((len(pairs), count + len(self.values)))
        for row, (name, reader) in zip(self.matrix, pairs, strict=True):
            row[column[name]] = 1
            if name in self.makers:
                row[self.makers[name]] = 1
            if reader is not None:
                row[reader] -= 1
        self.lower = np.array([1.0 if reader is None else 0.0 for _, reader in pairs])
        self.effort = np.array([*choice.effort, *(0 for _ in self.values)], dtype=float)
        self.bytes = np.array([*(0 for _ in choice.ops), *(choice.bytes[name] for name in self.values)], dtype=float)
        self.size = max(1, len(self.bytes))

    def corners(self) -> list[Point]:
        """The corners of the convex hull of the efficient choices, from most to fewest bytes; at most `CORNERS`."""
        first, last = self._ends()
        points, gaps = [first, last], [(first, last)]
        while gaps and len(points) < CORNERS:
            first, last = max(gaps, key=_area)
            gaps.remove((first, last))
            chord = self.bytes * (last.effort - first.effort) + self.effort * (first.bytes - last.bytes)
            point = self.solve(chord)
            if point and first.bytes > point.bytes > last.bytes and first.effort < point.effort < last.effort:
                points.append(point)
                gaps += [(first, point), (point, last)]
        return sorted(points, key=lambda point: -point.bytes)

    def _ends(self) -> tuple[Point, Point]:
        """The efficient choices of the least effort and of the fewest bytes."""
        quick, small = self.solve(self.effort), self.solve(self.bytes)
        if quick is None or small is None:
            raise InternalError("backward needs a value that is neither saved nor computed")
        return (
            self.solve(self.bytes, effort=quick.effort) or quick,
            self.solve(self.effort, bytes=small.bytes) or small,
        )

    def sweep(self, apart: int = 1) -> Iterator[Point]:
        """Efficient choices, from most to fewest bytes: each saves at least `apart` bytes less than the one before."""
        limit: int | None = None
        while limit is None or limit >= 0:
            quick = self.solve(self.effort, bytes=limit)
            if quick is None:
                return
            point = self.solve(self.bytes, effort=quick.effort) or quick
            yield min(point, quick, key=lambda point: point.bytes)
            limit = min(point.bytes, quick.bytes) - apart

    def solve(self, prices: Any, *, bytes: int | None = None, effort: int | None = None) -> Point | None:
        """The cheapest choice within these limits; None if there is none.

        Limits are checked in integers: the solver is exact only to its tolerance, so a limit that its solution exceeds
        is lowered by the excess.
        """
        if not self.values:
            return Point(saved=frozenset(), bytes=0, effort=0) if (bytes or 0) >= 0 else None
        given = ((self.bytes, bytes), (self.effort, effort))
        limits = [_Limit(row, most) for row, most in given if most is not None]
        for attempt in itertools.count():
            point = self._solved(prices, limits)
            if point is None:
                return None
            numbers = [number for number, most in ((point.bytes, bytes), (point.effort, effort)) if most is not None]
            excess = [limit.excess(number) for limit, number in zip(limits, numbers, strict=True)]
            if not any(excess):
                return point
            for limit, units in zip(limits, excess, strict=True):
                limit.room -= units << attempt
        return None

    def _solved(self, prices: Any, limits: Sequence[_Limit]) -> Point | None:
        rows = [LinearConstraints.dense(self.matrix, self.lower, np.inf)]
        rows += [LinearConstraints.dense(limit.row[None, :], -np.inf, limit.room + 0.5) for limit in limits]
        unit = math.gcd(*map(int, prices)) or 1
        found = solve_integer_program(
            prices / unit,
            rows,
            integral=np.ones(len(prices)),
            upper=1.0,
            options={"mip_rel_gap": 0.0, "mip_max_nodes": NODES},
        ).values
        return None if found is None else self._point(found > 0.5)

    def _point(self, chosen: Sequence[bool]) -> Point:
        count = len(self.choice.ops)
        saved = frozenset(name for name, kept in zip(self.values, chosen[count:], strict=True) if kept)
        effort = sum(effort for effort, again in zip(self.choice.effort, chosen[:count], strict=True) if again)
        return Point(saved=saved, bytes=sum(self.choice.bytes[name] for name in saved), effort=effort)

    def _relevant(self) -> set[str]:
        """The needed values, and those from which they can be recomputed."""
        found: set[str] = set()
        todo = list(self.choice.needed)
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                if name in self.makers:
                    todo.extend(self.choice.reads[self.makers[name]])
        return found
