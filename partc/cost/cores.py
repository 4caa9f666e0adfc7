"""Processes that share cores: computation is slower while more of them compute than there are cores.

All ranks at a pipeline coordinate compute concurrently. Those at different coordinates take turns, so that a rank may
have a core of its own while others wait for its result.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
ROUNDS = 8  # of playing the step with given paces, and deriving the next paces from it


@dataclass(frozen=True, slots=True, kw_only=True)
class BusySpan:
    """The time from `start` to `end`. The ranks at a pipeline coordinate compute during a share of it."""

    place: int
    start: float
    end: float
    share: float


def pace(computing: float, cores: int) -> float:
    """The slowdown of `computing` ranks on `cores` cores: 1 if each has its own. 0 cores means one core for each
    rank.
    """
    return max(1.0, computing / cores) if cores else 1.0


def paces(spans: Mapping[Name, BusySpan], ranks: int, cores: int) -> dict[Name, float]:
    """The pace of each span's computation, if the `ranks` ranks at each coordinate share the cores."""
    found = {}
    for name, span in spans.items():
        others = [each for each in spans.values() if each.place != span.place and _overlap(each, span) > 0]
        times = sorted(
            {span.start, span.end, *(min(max(t, span.start), span.end) for o in others for t in (o.start, o.end))}
        )
        total = 0.0
        for start, end in pairwise(times):
            beside = sum(each.share for each in others if each.start <= start and each.end >= end)
            total += (end - start) * pace(ranks * (1 + beside), cores)
        length = span.end - span.start
        found[name] = total / length if length > 0 else 1.0
    return found


def _overlap(one: BusySpan, other: BusySpan) -> float:
    return min(one.end, other.end) - max(one.start, other.start)
