"""The placement of whole tables on ranks: an integer program that balances bytes and traffic.

A table lies whole on one rank, or is spread over all ranks. Exchanges are even: every rank has as many slots for the
tables of a kind, and as many rows, as the rank with the most. A spread table costs each rank its share of the bytes,
and the traffic of its vectors. All whole tables share an exchange, and all spread ones another: each has messages whose
latency counts as traffic.

The objective is the sum of two ratios: the traffic and the bytes of a rank, each relative to a placement that spreads
all tables. Equal tables are only counted, and ranks are ordered by their bytes, so that few placements differ only in
names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partc.sharding.integer_program import LinearConstraints, solve_integer_program

_NODES = 2000  # of the search tree; if the solver finds nothing better in time, the greedy placement is used
_GAP = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTable:
    """A table that can be whole. `traffic` is the traffic of a slot of its kind, `spread` the table's if it is
    spread.
    """

    name: str
    kind: Hashable
    bytes: int
    traffic: float
    spread: float
    rank: int | None = None  # the rank given by a pin
    whole: bool = False  # whether a pin makes it whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """The latency of an exchange's messages, as traffic: of the exchange of whole tables, and of spread tables."""

    whole: float = 0.0
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """The rank of every whole table, and the price: 2 is the price of spreading all tables."""

    ranks: Mapping[str, int]
    price: float


def best_placement(tables: Sequence[WholeTable], ranks: int, starts: Starts = Starts()) -> Placement:
    """The best placement found."""
    if not any(_pinned(each) for each in tables) and not _promising(tables, ranks, starts):
        return _priced(tables, ranks, {}, starts)
    pinned = {each.name: each.rank or 0 for each in tables if _pinned(each)}
    candidates = pinned, largest_first(tables, ranks), _solved(tables, ranks, starts)
    return min((_priced(tables, ranks, found, starts) for found in candidates), key=lambda found: found.price)


def largest_first(tables: Sequence[WholeTable], ranks: int) -> dict[str, int]:
    """All tables whole: the largest first, each on the rank with the fewest bytes among those with the fewest slots."""
    loads, found = [0.0] * ranks, dict[str, int]()
    slots: Counter[tuple[Hashable, int]] = Counter()
    for each in sorted(tables, key=lambda each: (each.rank is None, -each.bytes)):
        best = min(range(ranks), key=lambda rank: (slots[each.kind, rank], loads[rank]))
        found[each.name] = rank = best if each.rank is None else each.rank
        loads[rank] += each.bytes
        slots[each.kind, rank] += 1
    return found


def price(tables: Sequence[WholeTable], ranks: int, found: Mapping[str, int], starts: Starts = Starts()) -> float:
    """The objective's value."""
    return _priced(tables, ranks, found, starts).price


def _promising(tables: Sequence[WholeTable], ranks: int, starts: Starts) -> bool:
    """Whether the tables of some kind together would save more than the cheapest of them costs when whole."""
    traffic, size = _units(tables, ranks, starts)
    saved: dict[Hashable, float] = dict.fromkeys({each.kind for each in tables}, starts.spread / traffic)
    for each in tables:
        saved[each.kind] += each.spread / traffic + each.bytes / ranks / size
    return any((starts.whole + each.traffic) / traffic + each.bytes / size < saved[each.kind] for each in tables)


def _pinned(each: WholeTable) -> bool:
    return each.whole or each.rank is not None


def _priced(tables: Sequence[WholeTable], ranks: int, found: Mapping[str, int], starts: Starts) -> Placement:
    slots: Counter[tuple[Hashable, int]] = Counter()
    held: Counter[tuple[Hashable, int]] = Counter()
    held_bytes = 0.0
    traffic = starts.whole * bool(found) + starts.spread * (len(found) < len(tables))
    for each in tables:
        if each.name in found:
            slots[each.kind, found[each.name]] += 1
            held[each.kind, found[each.name]] += each.bytes
        else:
            traffic += each.spread
            held_bytes += each.bytes / ranks
    of = {each.kind: each for each in tables}
    for kind, each in of.items():
        traffic += each.traffic * max(slots[kind, rank] for rank in range(ranks))
        held_bytes += max(held[kind, rank] for rank in range(ranks))
    units = _units(tables, ranks, starts)
    return Placement(dict(found), traffic / units[0] + held_bytes / units[1])


def _units(tables: Sequence[WholeTable], ranks: int, starts: Starts) -> tuple[float, float]:
    traffic = starts.spread + sum(each.spread for each in tables)
    return traffic or 1.0, sum(each.bytes for each in tables) / ranks or 1.0


def _solved(tables: Sequence[WholeTable], ranks: int, starts: Starts) -> dict[str, int]:
    """The integer program's placement; empty if the solver finds none in time."""
    import numpy as np

    program = _Program(tables, ranks, starts)
    rows, lower, most = zip(*program.rows(), strict=True)
    found = solve_integer_program(
        program.costs(),
        [LinearConstraints.dense(np.array(rows), lower, most)],
        integral=program.integral(),
        upper=program.upper_bounds(),
        options={"mip_rel_gap": _GAP, "mip_max_nodes": _NODES},
    ).values
    if found is None:
        return {each.name: each.rank or 0 for each in tables if _pinned(each)}
    return program.placement(found)


class _Program:
    """The integer program. Its columns are, for each set of equal tables, their number on each rank; for each kind, the
    most slots and the most bytes on a rank; whether tables are whole, and whether tables are spread.
    """

    def __init__(self, tables: Sequence[WholeTable], ranks: int, starts: Starts) -> None:
        self._tables, self._ranks, self._starts = tables, ranks, starts
        sets: dict[Hashable, list[WholeTable]] = {}
        for each in tables:
            sets.setdefault((each.kind, each.bytes, each.spread, each.rank, each.whole), []).append(each)
        self._sets = list(sets.values())
        self._kinds = {each.kind: each for each in tables}
        self._traffic, self._size = _units(tables, ranks, starts)
        self._most = len(self._sets) * ranks  # the first column of the most slots and bytes
        self._any_whole = self._most + 2 * len(self._kinds)
        self._any_spread = self._any_whole + 1
        self._count = self._any_spread + 1

    def _of_set(self, index: int) -> slice:
        """The columns of a set's numbers of tables, by rank."""
        return slice(index * self._ranks, (index + 1) * self._ranks)

    def costs(self) -> Any:
        """The price of a unit of each column. A table that stays whole saves the price of spreading it."""
        import numpy as np

        cost = np.zeros(self._count)
        for index, (first, *_) in enumerate(self._sets):
            cost[self._of_set(index)] = -first.spread / self._traffic - first.bytes / self._ranks / self._size
        for index, each in enumerate(self._kinds.values()):
            cost[self._most + 2 * index : self._most + 2 * index + 2] = each.traffic / self._traffic, 1
        cost[self._any_whole :] = self._starts.whole / self._traffic, self._starts.spread / self._traffic
        return cost

    def upper_bounds(self) -> Any:
        """The largest value of each column; a pin leaves a table one rank."""
        import numpy as np

        upper = np.full(self._count, np.inf)
        for index, equal in enumerate(self._sets):
            rank = equal[0].rank
            upper[self._of_set(index)] = len(equal) if rank is None else 0
            if rank is not None:
                upper[index * self._ranks + rank] = len(equal)
        upper[self._any_whole :] = 1
        return upper

    def integral(self) -> Any:
        """Whether each column is an integer."""
        import numpy as np

        columns = np.arange(self._count)
        return (columns < self._most) | (columns >= self._any_whole)

    def rows(self) -> Iterator[tuple[Any, float, float]]:
        """The constraints: the coefficients of the columns, and the bounds of their sum."""
        import numpy as np

        free = -np.inf
        for index, equal in enumerate(self._sets):
            row = np.zeros(self._count)
            row[self._of_set(index)] = 1
            yield row, len(equal) if _pinned(equal[0]) else free, len(equal)
        for rank in range(self._ranks):
            for number, kind in enumerate(self._kinds):
                slots, size = np.zeros(self._count), np.zeros(self._count)
                for index, (first, *_) in enumerate(self._sets):
                    if first.kind == kind:
                        slots[index * self._ranks + rank] = 1
                        size[index * self._ranks + rank] = first.bytes / self._size
                slots[self._most + 2 * number] = size[self._most + 2 * number + 1] = -1
                yield slots, free, 0
                yield size, free, 0
        whole, spread = np.zeros(self._count), np.zeros(self._count)
        whole[: self._most], whole[self._any_whole] = 1, -len(self._tables)
        yield whole, free, 0
        spread[: self._most], spread[self._any_spread] = -1, -len(self._tables)
        yield spread, free, -len(self._tables)
        if all(each.rank is None for each in self._tables):  # ranks are ordered by their bytes
            for rank in range(self._ranks - 1):
                row = np.zeros(self._count)
                for index, (first, *_) in enumerate(self._sets):
                    here = index * self._ranks + rank
                    row[here + 1], row[here] = first.bytes / self._size, -first.bytes / self._size
                yield row, free, 0

    def placement(self, solution: Any) -> dict[str, int]:
        """The rank that holds each whole table."""
        found: dict[str, int] = {}
        for index, equal in enumerate(self._sets):
            left = iter(equal)
            for rank in range(self._ranks):
                for _ in range(round(solution[index * self._ranks + rank])):
                    found[next(left).name] = rank
        return found
