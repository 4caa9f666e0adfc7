"""The cut of a tensor's dimensions, and its text: `[16@dp,mb, 3 · 4096@tp]`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

SubDim = tuple[int, tuple[str, ...]]  # a factor of a dimension: its size, and the axes that cut it, major first
Dims = tuple[tuple[SubDim, ...], ...]


class Sectioned(NamedTuple):
    """The order in which a dimension of a parameter is stored, if it is not the model's.

    In the model, the dimension consists of `sections`, which are given by their numbers of elements. Each is divided
    into `ways` equal parts. The first parts of all sections are stored first, then all second parts, and so on. A cut
    into `ways` parts thus gives each rank its part of every section.
    """

    dim: int
    ways: int
    sections: tuple[int, ...]

    @property
    def of_row(self) -> Sectioned:
        """The order of each row, for the order of a stack of rows."""
        return self._replace(dim=self.dim - 1)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The stored elements from `start` to `stop`, in runs of the model: (first element there, number)."""
        each = sum(self.sections) // self.ways
        for part in range(start // each, -(-stop // each)):
            here, before = part * each, 0
            for size in self.sections:
                length = size // self.ways
                first, last = max(here, start), min(here + length, stop)
                if first < last:
                    yield before + part * length + first - here, last - first
                here, before = here + length, before + size

    def __str__(self) -> str:
        return f"{self.dim}: {self.ways} of {'+'.join(map(str, self.sections))}"


@cache
def parse_dims(text: str) -> Dims:
    """Parse `[16@dp,mb, 3 · 4096@tp]`; marks after the bracket (`partial(tp)`) do not affect the cut."""
    inside = text[text.index("[") + 1 : text.index("]")]
    parts = [part for part in re.split(r",\s+|,(?=\d)", inside.strip()) if part]
    return tuple(tuple(_parse_subdim(factor) for factor in re.split(r"\s*[·*]\s*", part.strip())) for part in parts)


def global_shape(dims: Iterable[Iterable[tuple[int, Any]]]) -> tuple[int, ...]:
    """The shape of the whole tensor, from the factors (size, axes) of each dimension."""
    return tuple(math.prod(size for size, _ in dim) for dim in dims)


def written_dims(dims: Dims) -> str:
    """The text between the brackets that `parse_dims` reads."""
    return ", ".join(
        " · ".join(f"{size}@{','.join(axes)}" if axes else str(size) for size, axes in dim) for dim in dims
    )


def _parse_subdim(text: str) -> SubDim:
    size, _, axes = text.partition("@")
    return int(size), tuple(axes.split(",")) if axes else ()
