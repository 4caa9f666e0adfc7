"""The positions along a dimension that a rank holds, and their text: `2 · 16@cp zigzag 4 of 31`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from .dims import parse_dims


class Stretch(NamedTuple):
    """Consecutive positions from `start` to before `stop`; `held` is the index of the first one in the whole tensor."""

    start: int
    stop: int
    held: int


Stretches = tuple[Stretch, ...]


class Order(NamedTuple):
    """`zigzag 4 of 31`: of four equal parts, those of the second half are stored in reverse order, and the first 31
    positions are the model's. By default no part is reversed, and all positions are the model's (0).
    """

    parts: int = 0
    true: int = 0

    @classmethod
    def parse(cls, text: str) -> Order:
        parts, _, true = text.partition("of ")
        return cls(int(parts.removeprefix("zigzag ") or 0), int(true or 0))

    def __str__(self) -> str:
        return " ".join(f"{word} {number}" for word, number in (("zigzag", self.parts), ("of", self.true)) if number)


class Orders(NamedTuple):
    """`1 zigzag 4 of 31, 2 of 31`: the orders of some dimensions."""

    dims: tuple[tuple[int, Order], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Orders:
        found = (each.partition(" ") for each in text.split(", ") if each)
        return cls(tuple((int(dim), Order.parse(order)) for dim, _, order in found))

    def __str__(self) -> str:
        return ", ".join(f"{dim} {order}" for dim, order in self.dims)


class Positions(NamedTuple):
    """The cut of a dimension, as in a layout, and the order of its positions."""

    cut: str
    order: Order = Order()

    @classmethod
    def parse(cls, text: str) -> Positions:
        words = text.split(" ")
        at = next((place for place, word in enumerate(words) if word in ("zigzag", "of")), len(words))
        return cls(" ".join(words[:at]), Order.parse(" ".join(words[at:])))

    def __str__(self) -> str:
        return f"{self.cut} {self.order}".rstrip()

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for _, names in parse_dims(f"[{self.cut}]")[0] for name in names)

    def of_rank(self, places: Mapping[str, tuple[int, int]]) -> Stretches:
        """The positions that a rank holds; `places` maps each axis to (the rank's coordinate, size)."""
        found = _positions(self.cut, tuple(sorted(places.items())))
        size = math.prod(size for size, _ in parse_dims(f"[{self.cut}]")[0])
        return _in_zigzag(found, size, self.order.parts) if self.order.parts else found


def _in_zigzag(found: Stretches, size: int, parts: int) -> Stretches:
    """The positions of stretches of a tensor that stores the parts of its second half in reverse order."""
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
    """Join consecutive parts."""
    start, stop = next(parts)
    for first, last in parts:
        if first != stop:
            yield start, stop
            start = first
        stop = last
    yield start, stop
