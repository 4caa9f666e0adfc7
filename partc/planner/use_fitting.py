"""Fitting the uses of tp to a plan: in which calls it cuts the batch, and in which weights.

An integer program chooses the use of each call. The slowest pipeline rank is as quick as possible, within the memory of
the ranks. Consecutive equal calls of a rank change their use at most once, so that only their numbers are chosen. The
seconds of gradients' collectives count as far as computation does not hide them. Over tp they may also delay those of
values, so that uses are fitted a second time as if nothing were hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from partc.sharding.integer_program import LinearConstraints, solve_integer_program

Array = Any  # numpy's

HIDDEN = 0.6  # the share of computation that can overlap with the gradients' collectives
_NEARLY = 1.05  # the most seconds of mixed uses that are compared, as a multiple of the best single use's
_ALL = 1e-3  # the weight of all ranks' seconds, besides those of the slowest
_OPTIONS: Mapping[str, float] = {"mip_rel_gap": 1e-6, "time_limit": 5.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class UseNeeds:
    """The seconds and bytes of calls by [use, call]: use 0 cuts weights, use 1 the batch.

    A rank has `room` bytes; `ranks` are the calls of each, and `flights` its sets of (call, microbatches in flight).
    """

    seconds: Array  # of a step, without collectives of parameters and gradients
    moved: Array  # seconds of these collectives
    changes: Array  # by call: seconds of a change of the layout of the value that the call before it passes on
    held: Array  # bytes held throughout a step
    saved: Array  # bytes of a microbatch in flight
    inside: Array  # bytes inside a call, besides saved values
    names: Sequence[str]  # of regions
    ranks: Sequence[Sequence[int]]
    flights: Sequence[Sequence[Mapping[int, int]]]
    room: int
    hidden: float  # the share of computation that hides collectives


def fit_uses(needs: UseNeeds) -> tuple[int, ...] | None:
    """The use of each call. None if no mix of uses fits, or if a single use for all calls is clearly quicker."""
    model = _UseModel(needs)
    found = model.best(mixed=True)
    if found is None:
        return None
    single = min((seconds for use in (0, 1) if (seconds := model.alone(use)) is not None), default=np.inf)
    return found[1] if found[0] <= _NEARLY * single else None


class _UseModel:
    """The integer program. Its columns: the calls' uses, and changes before calls; for each rank the seconds that are
    not hidden, and the bytes inside its largest call; the seconds of the slowest rank; and for each run of equal calls
    whether the calls of use 0 come first.
    """

    def __init__(self, needs: UseNeeds) -> None:
        self.needs = needs
        self.calls = len(needs.names)
        self.unit = float(needs.seconds.sum()) or 1.0
        ranks = len(needs.ranks)
        self.exposed, self.inside, self.slowest = (2 * self.calls + each for each in (0, ranks, 2 * ranks))
        self.turns = self.slowest + 1
        self.runs = [*self._runs()]
        self.width = self.turns + len(self.runs)
        self.rows: list[tuple[dict[int, float], float]] = []  # (coefficients, upper bound)
        for rank, calls in enumerate(needs.ranks):
            self._add_rank(rank, calls)
        for call in range(1, self.calls):
            for sign in (1.0, -1.0):
                self._at_most({call: sign, call - 1: -sign, self.calls + call: -1.0}, 0.0)
        for turn, run in enumerate(self.runs, self.turns):
            for before, after in pairwise(run):
                self._at_most({after: 1.0, before: -1.0, turn: -1.0}, 0.0)
                self._at_most({before: 1.0, after: -1.0, turn: 1.0}, 1.0)

    def _runs(self) -> Iterator[list[int]]:
        """Runs of consecutive equal calls of one rank."""
        for calls in self.needs.ranks:
            run: list[int] = []
            for call in calls:
                if run and (call != run[-1] + 1 or self.needs.names[call] != self.needs.names[run[-1]]):
                    yield run
                    run = []
                run.append(call)
            yield run

    def _at_most(self, row: dict[int, float], bound: float) -> None:
        self.rows.append((row, bound))

    def _add_rank(self, rank: int, calls: Sequence[int]) -> None:
        needs = self.needs
        seconds, moved = needs.seconds / self.unit, needs.moved / self.unit

        def chosen(table: Array, factor: float = 1.0, some: Sequence[int] = calls) -> tuple[dict[int, float], float]:
            """The sum over calls as coefficients of their uses, and a constant."""
            terms = {call: factor * float(table[1, call] - table[0, call]) for call in some}
            return terms, factor * float(table[0, list(some)].sum())

        row, work = chosen(seconds)
        row |= {self.calls + call: float(needs.changes[call]) / self.unit for call in calls}
        self._at_most({**row, self.exposed + rank: 1.0, self.slowest: -1.0}, -work)
        row, left = chosen(moved - needs.hidden * seconds)
        self._at_most({**row, self.exposed + rank: -1.0}, -left)
        for call in calls:
            row, most = chosen(needs.inside, 1 / needs.room, [call])
            self._at_most({**row, self.inside + rank: -1.0}, -most)
        held, constant = chosen(needs.held, 1 / needs.room)
        for flight in needs.flights[rank] or ({},):
            row, total = {**held, self.inside + rank: 1.0}, constant
            for call, count in flight.items():
                more, own = chosen(needs.saved, count / needs.room, [call])
                row[call] += more[call]
                total += own
            self._at_most(row, 1.0 - total)

    def best(self, *, mixed: bool) -> tuple[float, tuple[int, ...]] | None:
        """The seconds of the slowest rank, and the uses; with `mixed`, both uses occur."""
        found = self._solved(np.array([float(mixed), self.calls - float(mixed)]), {})
        return None if found is None else (found[0], found[1])

    def alone(self, use: int) -> float | None:
        """The seconds of the slowest rank if all calls have one use; None if memory does not suffice."""
        found = self._solved(np.array([0.0, float(self.calls)]), dict.fromkeys(range(self.calls), use))
        return None if found is None else found[0]

    def _solved(self, number: Array, fixed: Mapping[int, int]) -> tuple[float, tuple[int, ...]] | None:
        entries = [(index, column, value) for index, (row, _) in enumerate(self.rows) for column, value in row.items()]
        cost = np.zeros(self.width)
        cost[self.slowest] = 1.0
        for column in range(self.exposed, self.exposed + len(self.needs.ranks)):
            cost[column] = _ALL
        cost[: self.calls] = _ALL * (self.needs.seconds[1] - self.needs.seconds[0]) / self.unit
        cost[self.calls : 2 * self.calls] = _ALL * self.needs.changes / self.unit
        whole = np.zeros(self.width)
        whole[: self.calls] = whole[self.turns :] = 1
        low, high = np.zeros(self.width), np.full(self.width, np.inf)
        high[: self.calls] = high[self.turns :] = 1
        for column, value in fixed.items():
            low[column] = high[column] = value
        total = np.zeros((1, self.width))
        total[0, : self.calls] = 1
        found = solve_integer_program(
            cost,
            [
                LinearConstraints.sparse(entries, -np.inf, [bound for _, bound in self.rows], len(self.rows)),
                LinearConstraints.dense(total, *number),
            ],
            integral=whole,
            lower=low,
            upper=high,
            options=_OPTIONS,
        ).values
        if found is None:
            return None
        return float(found[self.slowest]) * self.unit, tuple(round(use) for use in found[: self.calls])
