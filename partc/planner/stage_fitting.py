"""Fitting stages to a plan: which calls each stage has, and how it recomputes.

The slowest stage is as quick as possible, within the memory of the ranks. The first stages hold the values of the most
microbatches, so they recompute more, or have fewer calls. With one stage on each rank the choice is exact, by dynamic
programming over (calls left, stages left), as for balanced stages (passes/stages.py). Several stages on a rank stay
balanced; they share the rank's room in proportion to the bytes that they would hold without recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # numpy's

_DIGITS = 9  # of stages' seconds that are compared, so that sums in different orders are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeeds:
    """The bytes and seconds of calls, by way of recomputing, from which the needs of stages follow.

    `at` has the balanced stages of each rank, and `cuts` the first and the end call of each. `rows` are the sets of
    microbatches that ranks have in flight. A rank has `room` bytes.
    """

    held: Array  # bytes held throughout a step, as sums over the calls before each, in every way of recomputing
    saved: Array  # bytes of a microbatch in flight, as sums over the calls before each
    inside: Array  # bytes inside each call, besides saved values
    cuts: Sequence[tuple[int, int]]
    at: Sequence[Sequence[int]]
    rows: Sequence[Sequence[Sequence[tuple[int, int]]]]
    room: int

    def allowed(self) -> Sequence[Array]:
        """For each stage: whether it has room for a range of calls, by way of recomputing, start and end."""
        held, saved, inside = range_sums(self.held), range_sums(self.saved), largest(self.inside)
        flights, rooms = self._shares(self._balanced())
        return [held + count * saved + inside <= room for count, room in zip(flights, rooms, strict=True)]

    def allowed_ways(self) -> Array:
        """Whether each balanced stage has room for each way of recomputing, by way and stage."""
        balanced = self._balanced()
        flights, rooms = self._shares(balanced)
        held, saved, inside = balanced
        return held + flights * saved + inside <= rooms

    def _balanced(self) -> tuple[Array, Array, Array]:
        """The bytes that balanced stages need."""
        starts, ends = np.array(self.cuts).T
        inside = np.maximum.reduceat(self.inside, starts, axis=1)
        return self.held[ends] - self.held[starts], self.saved[:, ends] - self.saved[:, starts], inside

    def _shares(self, balanced: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        """The microbatches that each stage has in flight when its rank holds most, and its share of the rank's room."""
        held, (saved, *_), (inside, *_) = balanced
        flights, rooms = np.zeros(len(self.cuts)), np.zeros(len(self.cuts))
        for stages, mixes in zip(self.at, self.rows, strict=True):
            mix = max(mixes, key=lambda mix: sum(count * saved[stage] for stage, count in mix), default=())
            for stage, count in mix:
                flights[stage] = count
            own = held[stages] + flights[stages] * saved[stages] + inside[stages]
            rooms[stages] = self.room * (own / own.sum() if own.sum() else 1.0)
        return flights, rooms


def range_sums(sums: Array) -> Array:
    """The sum over the calls from each start to each end."""
    return sums[..., np.newaxis, :] - sums[..., :, np.newaxis]


def largest(values: Array) -> Array:
    """The largest value among the calls from each start to each end."""
    *ways, count = values.shape
    each = np.triu(np.broadcast_to(values[..., np.newaxis, :], (*ways, count, count)))
    found = np.zeros((*ways, count + 1, count + 1))
    found[..., :count, 1:] = np.maximum.accumulate(each, axis=-1)
    return found


def slowest(takes: Sequence[Array]) -> float:
    """The least seconds of the slowest stage; infinite if no stages exist. `takes` has each stage's seconds by start
    and end.
    """
    most = _empty_stages(takes[-1])
    for each in reversed(takes):
        most = np.maximum(each, most).min(axis=1)
    return float(most[0])


def fit(seconds: Array, allowed: Sequence[Array]) -> Sequence[tuple[int, int]] | None:
    """The end of each stage and its way of recomputing. None if no stages are allowed.

    The slowest stage takes as few seconds as possible; of several such choices, the sum of all stages' seconds is
    least.
    """
    seconds = np.round(seconds / (seconds[np.isfinite(seconds)].max(initial=0.0) or 1.0), _DIGITS)
    by_way = [np.where(each, seconds, np.inf) for each in allowed]
    takes = [each.min(axis=0) for each in by_way]
    most = slowest(takes)
    if not np.isfinite(most):
        return None
    total, chosen = _empty_stages(takes[-1]), []
    for each in reversed(takes):
        sums = np.where(each > most, np.inf, each) + total
        chosen.append(sums.argmin(axis=1))
        total = sums.min(axis=1)
    found, start = [], 0
    for ends, ways in zip(reversed(chosen), by_way, strict=True):
        end = int(ends[start])
        found.append((end, int(ways[:, start, end].argmin())))
        start = end
    return found


def fit_ways(seconds: Array, allowed: Array) -> Sequence[int] | None:
    """The quickest allowed way of each stage, given `seconds` by way and stage; None if a stage has no allowed way."""
    if not allowed.any(axis=0).all():
        return None
    takes = np.where(allowed, np.round(seconds / (seconds.max(initial=0.0) or 1.0), _DIGITS), np.inf)
    return [*takes.argmin(axis=0).tolist()]


def fits(allowed: Sequence[Array], places: Sequence[int]) -> bool:
    """Whether there are allowed stages that begin and end at the given places."""
    return math.isfinite(slowest([cuttable(np.where(each.any(axis=0), 0.0, np.inf), places) for each in allowed]))


def cuttable(seconds: Array, places: Sequence[int]) -> Array:
    """`seconds` by start and end, with infinity for stages that are empty, or do not begin and end at `places`."""
    fits = np.zeros(seconds.shape[-1], dtype=bool)
    fits[list(places)] = True
    wrong = np.tril(np.ones(seconds.shape[-2:], dtype=bool)) | ~(fits[:, np.newaxis] & fits[np.newaxis, :])
    return np.where(wrong, np.inf, seconds)


def _empty_stages(like: Array) -> Array:
    """The seconds of zero stages from each start on: 0 at the end, else infinite."""
    return np.where(np.arange(len(like)) == len(like) - 1, 0.0, np.inf)
