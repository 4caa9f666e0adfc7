"""Positions along a dimension of which a rank holds parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from .layout import parse_dims


class Stretch(NamedTuple):
    """Positions that follow each other, from `start` to before `stop`; their place in the whole tensor is `held`."""

    start: int
    stop: int
    held: int


Stretches = tuple[Stretch, ...]


def positions(dim: str, places: Mapping[str, tuple[int, int]]) -> Stretches:
    """The positions that a rank holds of a dimension `2 · 16@cp`; `places` has its place on each axis, and the size.

    `2 · 16@cp zigzag 4` says that of four equal parts those of the second half are held in reverse order.
    """
    dim, _, parts = dim.partition(" zigzag ")
    found = _positions(dim, tuple(sorted(places.items())))
    return _turned(found, math.prod(size for size, _ in parse_dims(f"[{dim}]")[0]), int(parts)) if parts else found


def _turned(found: Stretches, size: int, parts: int) -> Stretches:
    """The positions of stretches in a tensor with the parts of its second half in reverse order."""
    half, each = size // 2, size // parts
    made = []
    for start, stop, _ in found:
        if start < half:
            made.append(Stretch(start, min(stop, half), start))
        for part in range(parts // 2, parts):
            first, last = max(start, part * each), min(stop, (part + 1) * each)
            if first < last:
                there = (parts * 3 // 2 - 1 - part) * each - part * each
                made.append(Stretch(first + there, last + there, first))
    return tuple(made)


@cache
def _positions(dim: str, items: tuple[tuple[str, tuple[int, int]], ...]) -> Stretches:
    places = dict(items)
    found = [(0, 1)]
    for size, axes in parse_dims(f"[{dim}]")[0]:
        ways, place = 1, 0
        for name in axes:
            mine, count = places[name]
            ways, place = ways * count, place * count + mine
        here = size // ways
        first = place * here
        singles = (each for start, stop in found for each in range(start, stop))
        found = list(_joined((each * size + first, each * size + first + here) for each in singles))
    return tuple(Stretch(start, stop, start) for start, stop in found)


def _joined(parts: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Parts that follow each other are one."""
    start, stop = next(parts)
    for first, last in parts:
        if first != stop:
            yield start, stop
            start = first
        stop = last
    yield start, stop
