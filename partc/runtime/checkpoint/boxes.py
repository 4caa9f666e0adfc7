"""Boxes: the rectangles of a whole tensor that a rank holds under a layout, and the rank that writes each copy.

A plain shard is one box; a strided one (`3 · 4096@tp`, a fused QKV weight) is several.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..dims import Dims, Sectioned, SubDim
from ..place import PIPELINE


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a tensor: its start and its extent in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def meet(self, other: Box) -> Box | None:
        """The intersection of two boxes; None if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def seen_from(self, origin: Sequence[int]) -> Box:
        """The same box relative to `origin`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, origin, strict=True)), self.sizes)

    def _ends(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.offsets, self.sizes, strict=True))


def cover_fault(boxes: Sequence[Box], shape: tuple[int, ...]) -> str:
    """The reason why boxes do not cover a tensor exactly once; '' if they do."""
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            return f"a box has {len(box.offsets)} offsets and {len(box.sizes)} sizes in {len(shape)} dimensions"
        if any(end > size for end, size in zip(box._ends(), shape, strict=True)):
            return f"the box of {list(box.sizes)} at {list(box.offsets)} does not lie in {list(shape)}"
    twice = _overlap(boxes)
    if twice is not None:
        first, second = twice
        return f"the boxes at {list(first.offsets)} and {list(second.offsets)} overlap"
    covered, elements = sum(math.prod(box.sizes) for box in boxes), math.prod(shape)
    return "" if covered == elements else f"boxes have {covered:,} elements of {elements:,}"


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes with a common element. Boxes of a grid are separated by planes, group by group."""
    left = [list(boxes)]
    while left:
        group = left.pop()
        parts = (
            next((parts for dim in range(len(group[0].sizes)) if len(parts := _separated(group, dim)) > 1), None)
            if group
            else None
        )
        if parts is not None:
            left.extend(parts)
        else:
            for first, second in itertools.combinations(group, 2):
                if first.meet(second) is not None:
                    return first, second
    return None


def _separated(boxes: Sequence[Box], dim: int) -> list[list[Box]]:
    """Groups of boxes that planes across `dim` separate."""
    groups: list[list[Box]] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        if not groups or box.offsets[dim] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box.offsets[dim] + box.sizes[dim])
    return groups


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the whole tensor, and its start in the rank's own part."""

    whole: Box
    local: tuple[int, ...]

    @property
    def here(self) -> Box:
        """The piece in the rank's own part."""
        return Box(self.local, self.whole.sizes)


Run = tuple[int, int, int]  # (first element in the whole, first element in the part, number of elements)


def pieces(
    dims: Dims,
    shape: Sequence[int],
    sizes: Mapping[str, int],
    coordinate: Mapping[str, int],
    sectioned: Sectioned | None = None,
) -> tuple[Piece, ...]:
    """The boxes of a tensor at a coordinate. `shape` is the model's own: padding is left out."""
    runs = [_runs(dim, size, sizes, coordinate) for dim, size in zip(dims, shape, strict=True)]
    if sectioned is not None:
        runs[sectioned.dim] = _joined([*_in_model_order(runs[sectioned.dim], sectioned)])
    return tuple(
        Piece(Box(tuple(run[0] for run in chosen), tuple(run[2] for run in chosen)), tuple(run[1] for run in chosen))
        for chosen in itertools.product(*runs)
    )


def _runs(dim: Sequence[SubDim], size: int, sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> list[Run]:
    """The runs of elements in one dimension, with neighbours joined, cut off at `size`; spare elements are left out."""
    runs: list[Run] = [(0, 0, 1)]
    whole = part = 1  # the number of elements in one step of the next factor
    for factor, axes in reversed(dim):
        ways, place = 1, 0
        for axis in axes:
            if sizes.get(axis, 1) > 1:
                ways, place = ways * sizes[axis], place * sizes[axis] + coordinate.get(axis, 0)
        count = -(-factor // ways)
        first, last = min(place * count, factor), min((place + 1) * count, factor)
        if runs == [(0, 0, whole)] and whole == part:
            runs = [(first * whole, 0, (last - first) * whole)]
        else:
            runs = [
                (step * whole + start, (step - first) * part + here, length)
                for step in range(first, last)
                for start, here, length in runs
            ]
        whole, part = whole * factor, part * count
    runs = [(start, here, min(length, size - start)) for start, here, length in _joined(runs)]
    return [run for run in runs if run[2] > 0]


def _in_model_order(runs: Sequence[Run], order: Sectioned) -> Iterator[Run]:
    for first, here, length in runs:
        for start, count in order.runs(first, first + length):
            yield start, here, count
            here += count


def _joined(runs: Sequence[Run]) -> list[Run]:
    joined: list[Run] = []
    for start, here, length in runs:
        if joined and joined[-1][0] + joined[-1][2] == start and joined[-1][1] + joined[-1][2] == here:
            joined[-1] = (joined[-1][0], joined[-1][1], joined[-1][2] + length)
        else:
            joined.append((start, here, length))
    return joined


def writes_tensor(
    name: str,
    cut: Collection[str],
    sizes: Mapping[str, int],
    coordinate: Mapping[str, int],
    holders: Sequence[int],
) -> bool:
    """Whether this rank writes the tensor, among all ranks with an equal copy.

    `cut` has the axes along which ranks have different elements, `holders` the pipeline ranks that have the tensor.
    """
    copy, copies = numbered_copy(cut, sizes, coordinate, holders)
    return copy == written_copy(name, copies)


def numbered_copy(
    cut: Collection[str], sizes: Mapping[str, int], coordinate: Mapping[str, int], holders: Sequence[int]
) -> tuple[int, int]:
    """The number of a rank's copy of a tensor, and the number of all copies. Arguments are as in `writes_tensor`."""
    ways = [(len(holders), holders.index(coordinate.get(PIPELINE, 0)))]
    ways += [(size, coordinate[axis]) for axis, size in sizes.items() if axis not in (PIPELINE, *cut)]
    copy = 0
    for size, place in ways:
        copy = copy * size + place
    return copy, math.prod(size for size, _ in ways)


def written_copy(name: str, copies: int) -> int:
    """The copy that is written; names are distributed over copies, so that ranks write similar amounts."""
    return zlib.crc32(name.encode()) % copies
