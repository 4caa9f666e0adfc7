"""Layouts: the sub-dimensions of a tensor's dimensions, and the mesh axes that shard them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

Sizes = Mapping[str, int]  # axis name -> number of ranks (or of microbatches, for "mb")


@dataclass(frozen=True, slots=True)
class SubDim:
    """A factor of a dimension: `size` elements (global), sharded over `axes`, major axis first.

    Parts are equal. If the axes do not divide the size, the last parts end with spare elements, which are padding; only
    parameters are cut in this way, over axes that gather them.
    """

    size: int
    axes: tuple[str, ...] = ()

    def part(self, sizes: Sizes) -> int:
        """The elements of each part, spare ones included."""
        return -(-self.size // math.prod(sizes[axis] for axis in self.axes))

    def spare(self, sizes: Sizes) -> int:
        """The number of spare elements of all parts: their total size minus `size`."""
        return -self.size % math.prod(sizes[axis] for axis in self.axes)

    def __str__(self) -> str:
        return f"{self.size}@{','.join(self.axes)}" if self.axes else str(self.size)


@dataclass(frozen=True, slots=True)
class Shard:
    """A placement on one axis: dimension `dim`, viewed as [outer, rest], is cut along `rest`."""

    dim: int
    outer: int = 1


@dataclass(frozen=True, slots=True)
class Replicated:
    """Equal on every rank of the axis; so is its gradient."""


@dataclass(frozen=True, slots=True)
class Varying:
    """Equal on every rank of the axis, with a gradient that is a sum over these ranks."""


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the sum over the ranks of the axis."""


Placement = Shard | Replicated | Varying | Partial


@dataclass(frozen=True)
class Layout:
    """The sub-dimensions of each dimension, from major to minor, and the partial, varying and local axes.

    An axis that appears nowhere is replicated. `[16@dp · 2048@tp, 4096]` is a flattened (batch, sequence) dimension
    whose two parts are sharded over two axes. Over a local axis each rank has a value of its own in the given shape,
    and no layout relates these values to each other: intermediate results of an operation without a rule.
    """

    dims: tuple[tuple[SubDim, ...], ...]
    partial: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()
    local: tuple[str, ...] = ()

    @classmethod
    def replicated(cls, shape: Iterable[int]) -> Layout:
        return cls(tuple((SubDim(size),) for size in shape))

    @classmethod
    def build(cls, shape: Sequence[int], placements: Mapping[str, Placement], sizes: Sizes) -> Layout | None:
        """The layout that has these placements, or None where sizes don't divide.

        Axes that cut the same sub-dimension nest in the order of `placements`, major first.
        """
        return _built(tuple(shape), tuple(placements.items()), tuple(sizes[axis] for axis in placements))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(math.prod(sub.size for sub in dim) for dim in self.dims)

    def local_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape that one rank holds for one microbatch."""
        if sizes is not self._last_local[0]:
            self._last_local[:] = sizes, tuple(math.prod(sub.part(sizes) for sub in dim) for dim in self.dims)
        return self._last_local[1]  # type: ignore[return-value]

    @cached_property
    def _last_local(self) -> list[object]:
        """The last argument of `local_shape` and its result."""
        return [None, None]

    @cached_property
    def sharded_axes(self) -> tuple[str, ...]:
        return tuple(axis for dim in self.dims for sub in dim for axis in sub.axes)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """All axes that are not replicated."""
        return (*self.sharded_axes, *self.partial, *self.varying, *self.local)

    def placement(self, axis: str) -> Placement:
        if axis in self.partial:
            return Partial()
        if axis in self.varying:
            return Varying()
        for index, dim in enumerate(self.dims):
            outer = 1
            for sub in dim:
                if axis in sub.axes:
                    return Shard(index, outer)
                outer *= sub.size
        return Replicated()

    def placements(self, order: Iterable[str]) -> dict[str, Placement]:
        """Placements by axis, in the given order; axes that cut a dimension come as they nest."""
        known = tuple(order)
        nested = iter([axis for axis in self.sharded_axes if axis in known])
        ordered = [next(nested) if axis in self.sharded_axes else axis for axis in known]
        return {axis: self.placement(axis) for axis in ordered}

    def normalized(self, sizes: Sizes) -> Layout:
        """The canonical form: equal layouts compare equal once normalized.

        Axes of size 1 shard nothing and are dropped from the dimensions. An unsharded sub-dimension joins the one
        before it. A sub-dimension that is cut down to single elements joins the next one. One with spare elements joins
        no sharded one.
        """
        dims = tuple(_normalized_dim(dim, sizes) for dim in self.dims)
        partial, varying, local = (
            tuple(sorted(axis for axis in axes if sizes[axis] > 1)) for axes in (self.partial, self.varying, self.local)
        )
        return Layout(dims, partial, varying, local)

    def without(self, *axes: str) -> Layout:
        """The same layout with these axes replicated (not normalized)."""
        drop = set(axes)
        return Layout(
            tuple(tuple(SubDim(s.size, tuple(a for a in s.axes if a not in drop)) for s in dim) for dim in self.dims),
            tuple(a for a in self.partial if a not in drop),
            tuple(a for a in self.varying if a not in drop),
            tuple(a for a in self.local if a not in drop),
        )

    def dual(self) -> Layout:
        """The layout of the gradient: varying axes become partial, partial axes become replicated."""
        return replace(self, partial=self.varying, varying=())

    def __str__(self) -> str:
        dims = ", ".join(" · ".join(map(str, dim)) for dim in self.dims)
        marked = (("partial", self.partial), ("vary", self.varying), ("local", self.local))
        return f"[{dims}]" + "".join(f" {mark}({','.join(axes)})" for mark, axes in marked if axes)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse the result of `str`; `*` may stand for `·`. Raises ValueError."""
        match = re.fullmatch(r"\[([^\]]*)\]((?:\s+(?:partial|vary|local)\([\w,]+\))*)", text.strip())
        if not match:
            raise ValueError(f"not a layout: {text!r}")
        dims = tuple(_parse_dim(part) for part in _split_dims(match.group(1)))
        marked = re.findall(r"(partial|vary|local)\(([\w,]+)\)", match.group(2))
        marks = {kind: tuple(axes.split(",")) for kind, axes in marked}
        return cls(dims, *(marks.get(kind, ()) for kind in ("partial", "vary", "local")))


@lru_cache(maxsize=1 << 16)
def _built(
    shape: tuple[int, ...], placements: tuple[tuple[str, Placement], ...], counts: tuple[int, ...]
) -> Layout | None:
    """The layout of `Layout.build`; `counts` are the sizes of the axes of `placements`."""
    sizes = dict(zip((axis for axis, _ in placements), counts, strict=True))
    cuts: list[dict[int, list[str]]] = [{} for _ in shape]
    for axis, placement in placements:
        if isinstance(placement, Shard):
            cuts[placement.dim].setdefault(placement.outer, []).append(axis)
    dims = []
    for size, cut in zip(shape, cuts, strict=True):
        bounds = sorted({1, *cut})
        if any(outer and (size % outer) for outer in bounds):
            return None
        subdims = []
        for outer, end in zip(bounds, [*bounds[1:], size], strict=True):
            axes = tuple(cut.get(outer, ()))
            if end % outer or (end // outer) % math.prod(sizes[axis] for axis in axes):
                return None
            subdims.append(SubDim(end // outer, axes))
        dims.append(tuple(subdims))
    partial = tuple(axis for axis, placement in placements if isinstance(placement, Partial))
    varying = tuple(axis for axis, placement in placements if isinstance(placement, Varying))
    return Layout(tuple(dims), partial, varying).normalized(sizes)


def index_ranges(
    layout: Layout, coordinate: Mapping[str, int], sizes: Sizes
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each dimension, the global ranges [start, end) that the rank at a coordinate holds, in local order."""
    return tuple(_dim_ranges(dim, coordinate, sizes) for dim in layout.dims)


def _dim_ranges(dim: tuple[SubDim, ...], coordinate: Mapping[str, int], sizes: Sizes) -> tuple[tuple[int, int], ...]:
    ranges: tuple[tuple[int, int], ...] = ((0, 1),)
    below = 1  # elements of the more minor sub-dimensions, to which `ranges` refer
    for sub in reversed(dim):
        place = 0
        for axis in sub.axes:
            place = place * sizes[axis] + coordinate.get(axis, 0)
        inside = sub.part(sizes)
        first, last = min(place * inside, sub.size), min((place + 1) * inside, sub.size)
        if ranges == ((0, below),):
            ranges = ((first * below, last * below),)
        else:
            ranges = tuple((i * below + start, i * below + end) for i in range(first, last) for start, end in ranges)
        below *= sub.size
    return ranges


def _normalized_dim(dim: tuple[SubDim, ...], sizes: Sizes) -> tuple[SubDim, ...]:
    result: list[SubDim] = []
    for sub in dim:
        axes = tuple(axis for axis in sub.axes if sizes[axis] > 1)
        last = result[-1] if result else None
        exhausted = last is not None and last.axes and last.part(sizes) == 1
        joinable = last is not None and not last.spare(sizes) and not (last.axes and sub.spare(sizes))
        if last is not None and joinable and (not axes or exhausted or last.size == 1):
            result[-1] = SubDim(last.size * sub.size, last.axes + axes)
        else:
            result.append(SubDim(sub.size, axes))
    return tuple(result)


def _split_dims(text: str) -> list[str]:
    """Split at the commas between dimensions, not at those between axes (`16@dp,mb, 4`)."""
    return [part for part in re.split(r",\s+|,(?=\d)", text.strip()) if part]


def _parse_dim(text: str) -> tuple[SubDim, ...]:
    subs = []
    for part in re.split(r"\s*[·*]\s*", text.strip()):
        match = re.fullmatch(r"(\d+)(?:@([a-z_][\w]*(?:,[a-z_][\w]*)*))?", part)
        if not match:
            raise ValueError(f"not a dimension: {text!r}")
        subs.append(SubDim(int(match.group(1)), tuple(match.group(2).split(",")) if match.group(2) else ()))
    return tuple(subs)
