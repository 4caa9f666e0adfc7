"""Stages that are fitted to a plan: the calls of each, and its way of recomputing.

The slowest stage is as quick as possible, and ranks hold no more than there is room for. First stages hold the values
of most microbatches: they recompute more, or have fewer calls. With one stage on each rank the choice is exact, by
dynamic programming over (calls left, stages left), as for balanced stages (passes/stages.py). Several stages on a rank
stay balanced, and each has a share of the rank's room, in the proportion of what they would hold without recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # numpy's

_DIGITS = 9  # of the seconds of stages that are compared: sums in different orders are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeeds:
    """The bytes of stages from one place between calls to another: arrays by way of recomputing, start and end."""

    held: Array  # through a step, in every way
    saved: Array  # of a microbatch in flight
    inside: Array  # the most inside a call, besides saved values

    def allowed(
        self,
        cuts: Sequence[tuple[int, int]],
        at: Sequence[Sequence[int]],
        rows: Sequence[Sequence[Sequence[tuple[int, int]]]],
        room: int,
    ) -> Sequence[Array]:
        """For each stage, whether it may have these calls, where a rank has `room`: by way, start and end.

        `cuts` are balanced stages, `at` those of each rank, `rows` the sets of microbatches that ranks have in flight.
        """
        found: dict[int, Array] = {}
        for stages, mixes in zip(at, rows, strict=True):
            saved = {stage: self.saved[0][cuts[stage]] for stage in stages}
            size = lambda mix: sum(count * saved[stage] for stage, count in mix.items())  # noqa: E731, B023
            mix = max(map(dict, mixes), key=size, default={})
            needed = {stage: self.held[np.newaxis] + mix.get(stage, 0) * self.saved + self.inside for stage in stages}
            own = {stage: needed[stage][0][cuts[stage]] for stage in stages}
            whole = sum(own.values())
            found |= {stage: needed[stage] <= room * (own[stage] / whole if whole else 1) for stage in stages}
        return [found[stage] for stage in range(len(cuts))]


def between(sums: Sequence[float]) -> Array:
    """The sums over calls from each start to each end."""
    each = np.asarray(sums, dtype=np.float64)
    return each[np.newaxis, :] - each[:, np.newaxis]


def largest(values: Sequence[float]) -> Array:
    """The largest value of calls from each start to each end."""
    count = len(values)
    each = np.triu(np.tile(np.asarray(values, dtype=np.float64), (count, 1)))
    found = np.zeros((count + 1, count + 1))
    found[:count, 1:] = np.maximum.accumulate(each, axis=1)
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


def cuttable(seconds: Array, places: Sequence[int]) -> Array:
    """The seconds of stages that have calls, and begin and end at places where they may; others are infinite."""
    fits = np.zeros(seconds.shape[-1], dtype=bool)
    fits[list(places)] = True
    wrong = np.tril(np.ones(seconds.shape[-2:], dtype=bool)) | ~(fits[:, np.newaxis] & fits[np.newaxis, :])
    return np.where(wrong, np.inf, seconds)


def only(allowed: Array, cut: tuple[int, int]) -> Array:
    """Stages that have these calls and no others."""
    found = np.zeros_like(allowed)
    found[:, cut[0], cut[1]] = allowed[:, cut[0], cut[1]]
    return found


def _nothing(like: Array) -> Array:
    """The seconds of no stages from each start on."""
    return np.where(np.arange(len(like)) == len(like) - 1, 0.0, np.inf)
