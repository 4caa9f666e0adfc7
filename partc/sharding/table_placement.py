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
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partc.sharding.integer_program import solve_integer_program

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
    """The integer program's placement; empty if the solver finds none in time.

    Variables: for each set of equal tables, their number on each rank; for each kind, the most slots on a rank; the
    most bytes; whether tables are whole, and whether tables are spread.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint

    sets: dict[Hashable, list[WholeTable]] = {}
    for each in tables:
        sets.setdefault((each.kind, each.bytes, each.spread, each.rank, each.whole), []).append(each)
    alike = list(sets.values())
    kinds = {kind: index for index, kind in enumerate(dict.fromkeys(each.kind for each in tables))}
    of = {each.kind: each for each in tables}
    first = len(alike) * ranks
    any_whole = first + 2 * len(kinds)
    count = any_whole + 2
    traffic, size = _units(tables, ranks, starts)
    cost, upper = np.zeros(count), np.full(count, np.inf)
    for index, some in enumerate(alike):
        each = some[0]
        cost[index * ranks : (index + 1) * ranks] = -each.spread / traffic - each.bytes / ranks / size
        upper[index * ranks : (index + 1) * ranks] = len(some) if each.rank is None else 0
        if each.rank is not None:
            upper[index * ranks + each.rank] = len(some)
    for kind, index in kinds.items():
        cost[first + 2 * index : first + 2 * index + 2] = of[kind].traffic / traffic, 1
    cost[any_whole:], upper[any_whole:] = (starts.whole / traffic, starts.spread / traffic), 1
    rows: list[Any] = []
    lower, most = list[float](), list[float]()

    def at_most(row: Any, bound: float, least: float = -np.inf) -> None:
        rows.append(row)
        lower.append(least)
        most.append(bound)

    for index, some in enumerate(alike):
        row = np.zeros(count)
        row[index * ranks : (index + 1) * ranks] = 1
        at_most(row, len(some), len(some) if _pinned(some[0]) else -np.inf)
    for rank in range(ranks):
        for kind, index in kinds.items():
            for place in (0, 1):
                row = np.zeros(count)
                for number, some in enumerate(alike):
                    if some[0].kind == kind:
                        row[number * ranks + rank] = some[0].bytes / size if place else 1
                row[first + 2 * index + place] = -1
                at_most(row, 0)
    whole = np.zeros(count)
    whole[:first], whole[any_whole] = 1, -len(tables)
    at_most(whole, 0)
    spread = np.zeros(count)
    spread[:first], spread[any_whole + 1] = -1, -len(tables)
    at_most(spread, -len(tables))
    if all(each.rank is None for each in tables):
        for rank in range(ranks - 1):
            row = np.zeros(count)
            for number, some in enumerate(alike):
                here = some[0].bytes / size
                row[number * ranks + rank + 1], row[number * ranks + rank] = here, -here
            at_most(row, 0)
    found = solve_integer_program(
        cost,
        constraints=[LinearConstraint(np.array(rows), np.array(lower), np.array(most))],
        integrality=(np.arange(count) < first) | (np.arange(count) >= any_whole),
        bounds=Bounds(0, upper),
        options={"mip_rel_gap": _GAP, "node_limit": _NODES},
    )
    if found.x is None:
        return {each.name: each.rank or 0 for each in tables if _pinned(each)}
    ranked: dict[str, int] = {}
    for index, some in enumerate(alike):
        left = iter(some)
        for rank in range(ranks):
            for _ in range(round(found.x[index * ranks + rank])):
                ranked[next(left).name] = rank
    return ranked
