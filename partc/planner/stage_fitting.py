"""Stages that are fitted to a plan: the calls of each, and its way of recomputing.

The slowest stage is as quick as possible, and ranks hold no more than there is room for. First stages hold the values
of most microbatches: they recompute more, or have fewer calls. With one stage on each rank the choice is exact, by
dynamic programming over (calls left, stages left), as for balanced stages (passes/stages.py). Several stages on a rank
stay balanced, and each has a share of the rank's room, in the proportion of what they would hold without recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # numpy's

_DIGITS = 9  # of the seconds of stages that are compared: sums in different orders are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeeds:
    """The bytes and seconds of calls, by way of recomputing, from which those of stages follow.

    `at` has the balanced stages of each rank, from and to the calls of `cuts`, `rows` the sets of microbatches that
    ranks have in flight. A rank has `room`.
    """

    held: Array  # bytes through a step of the calls before each, in every way
    saved: Array  # bytes of a microbatch in flight, of the calls before each
    inside: Array  # bytes inside each call, besides saved values
    cuts: Sequence[tuple[int, int]]
    at: Sequence[Sequence[int]]
    rows: Sequence[Sequence[Sequence[tuple[int, int]]]]
    room: int

    def allowed(self) -> Sequence[Array]:
        """For each stage, whether it may have calls: by way, start and end."""
        held, saved, inside = between(self.held), between(self.saved), largest(self.inside)
        flights, rooms = self._shares(self._balanced())
        return [held + count * saved + inside <= room for count, room in zip(flights, rooms, strict=True)]

    def allowed_ways(self) -> Array:
        """Whether each balanced stage may recompute in each way, by way and stage."""
        balanced = self._balanced()
        flights, rooms = self._shares(balanced)
        held, saved, inside = balanced
        return held + flights * saved + inside <= rooms

    def _balanced(self) -> tuple[Array, Array, Array]:
        """The needs of balanced stages."""
        starts, ends = np.array(self.cuts).T
        inside = np.maximum.reduceat(self.inside, starts, axis=1)
        return self.held[ends] - self.held[starts], self.saved[:, ends] - self.saved[:, starts], inside

    def _shares(self, balanced: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        """The microbatches that each stage has in flight, as its rank holds most, and its share of the rank's room."""
        held, (saved, *_), (inside, *_) = balanced
        flights, rooms = np.zeros(len(self.cuts)), np.zeros(len(self.cuts))
        for stages, mixes in zip(self.at, self.rows, strict=True):
            mix = max(mixes, key=lambda mix: sum(count * saved[stage] for stage, count in mix), default=())
            for stage, count in mix:
                flights[stage] = count
            own = held[stages] + flights[stages] * saved[stages] + inside[stages]
            rooms[stages] = self.room * (own / own.sum() if own.sum() else 1.0)
        return flights, rooms


def between(sums: Array) -> Array:
    """The sums over calls from each start to each end."""
    return sums[..., np.newaxis, :] - sums[..., :, np.newaxis]


def largest(values: Array) -> Array:
    """The largest value of calls from each start to each end."""
    *ways, count = values.shape
    each = np.triu(np.broadcast_to(values[..., np.newaxis, :], (*ways, count, count)))
    found = np.zeros((*ways, count + 1, count + 1))
    found[..., :count, 1:] = np.maximum.accumulate(each, axis=-1)
    return found


def slowest(takes: Sequence[Array]) -> float:
    """The least seconds of the slowest stage; infinite if there are none. `takes` has each stage's by start and end."""
    most = _nothing(takes[-1])
    for each in reversed(takes):
        most = np.maximum(each, most).min(axis=1)
    return float(most[0])


def fit(seconds: Array, allowed: Sequence[Array]) -> Sequence[tuple[int, int]] | None:
    """The end and the way of each stage with the least seconds of the slowest one; of several such, the least sum.

    None if no stages are allowed.
    """
    seconds = np.round(seconds / (seconds[np.isfinite(seconds)].max(initial=0.0) or 1.0), _DIGITS)
    by_way = [np.where(each, seconds, np.inf) for each in allowed]
    takes = [each.min(axis=0) for each in by_way]
    most = slowest(takes)
    if not np.isfinite(most):
        return None
    total, chosen = _nothing(takes[-1]), []
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
    """The quickest way of each stage, of `seconds` by way and stage; None if a stage has no allowed one."""
    if not allowed.any(axis=0).all():
        return None
    takes = np.where(allowed, np.round(seconds / (seconds.max(initial=0.0) or 1.0), _DIGITS), np.inf)
    return [*takes.argmin(axis=0).tolist()]


def fits(allowed: Sequence[Array], places: Sequence[int]) -> bool:
    """Whether any stages that begin and end at some places are allowed."""
    return math.isfinite(slowest([cuttable(np.where(each.any(axis=0), 0.0, np.inf), places) for each in allowed]))


def cuttable(seconds: Array, places: Sequence[int]) -> Array:
    """The seconds of stages that have calls, and begin and end at places where they may; others are infinite."""
    fits = np.zeros(seconds.shape[-1], dtype=bool)
    fits[list(places)] = True
    wrong = np.tril(np.ones(seconds.shape[-2:], dtype=bool)) | ~(fits[:, np.newaxis] & fits[np.newaxis, :])
    return np.where(wrong, np.inf, seconds)


def _nothing(like: Array) -> Array:
    """The seconds of no stages from each start on."""
    return np.where(np.arange(len(like)) == len(like) - 1, 0.0, np.inf)
