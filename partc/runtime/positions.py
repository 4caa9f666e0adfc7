"""Positions along a dimension of which a rank holds parts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from .layout import parse_dims

Run = tuple[int, int]  # the first position, and the one after the last
Runs = tuple[Run, ...]


def positions(dim: str, places: Mapping[str, tuple[int, int]]) -> Runs:
    """The positions that a rank holds of a dimension `2 · 16@cp`; `places` has its place on each axis, and the size."""
    return _positions(dim, tuple(sorted(places.items())))


@cache
def _positions(dim: str, items: tuple[tuple[str, tuple[int, int]], ...]) -> Runs:
    places = dict(items)
    found: list[Run] = [(0, 1)]
    for size, axes in parse_dims(f"[{dim}]")[0]:
        ways, place = 1, 0
        for name in axes:
            mine, count = places[name]
            ways, place = ways * count, place * count + mine
        here = size // ways
        first = place * here
        found = _joined([(start * size + first, start * size + first + here) for start, stop in _ones(found)])
    return tuple(found)


def _ones(found: list[Run]) -> list[Run]:
    return [(start, start + 1) for first, last in found for start in range(first, last)]


def _joined(found: list[Run]) -> list[Run]:
    """Runs that follow each other are one."""
    joined: list[Run] = []
    for start, stop in found:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined
