"""`as_strided` views: overlapping windows of rows, as `unfold` returns them, and slices.

Autograd reads and writes views by `as_strided` in derivatives of their changes in place. `SLICED` has slices for them,
because torch's own derivative of `as_strided_scatter` is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from partc.errors import PartcError
from partc.torch_private import OpOverload


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """`count` windows of `size` rows, one every `step` rows; `shape` is the operand's with all rows in one
    dimension.
    """

    shape: tuple[int, ...]
    dim: int
    count: int
    size: int
    step: int


def windows(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Windows | None:
    """The windows that `x.as_strided(size, stride, offset)` reads; None if it reads something else.

    Leading and trailing dimensions equal those of x; between them, x has rows, and the result has windows and their
    rows.
    """
    if len(size) < 2 or offset not in (None, x.storage_offset()):
        return None
    for lead in range(min(len(size) - 1, x.dim())):
        trail = len(size) - 2 - lead
        end = x.dim() - trail
        mine, strides = tuple(x.shape), x.stride()
        ends = (size[:lead], stride[:lead], size[lead + 2 :], stride[lead + 2 :])
        if end <= lead or tuple(map(tuple, ends)) != (mine[:lead], strides[:lead], mine[end:], strides[end:]):
            continue
        rows, row = mine[lead:end], strides[end - 1]
        even = all(a == b * n for (a, b), n in zip(pairwise(strides[lead:end]), rows[1:], strict=True))
        step, rest = divmod(stride[lead], row) if row else (0, 1)
        fits = step > 0 and (size[lead] - 1) * step + size[lead + 1] <= math.prod(rows)
        if even and not rest and fits and stride[lead + 1] == row:
            shape = (*mine[:lead], math.prod(rows), *mine[end:])
            return Windows(shape=shape, dim=lead, count=size[lead], size=size[lead + 1], step=step)
    return None


def _sliced(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    return _SlicedView.of(x, size, stride, offset).read(x)


def _slice_written(
    x: Tensor, part: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor:
    return _SlicedView.of(x, size, stride, offset).written(x, part)


SLICED: dict[OpOverload, Callable[..., Tensor]] = {
    torch.ops.aten.as_strided.default: _sliced,
    torch.ops.aten.as_strided_scatter.default: _slice_written,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlicedView:
    """A view: a slice (start, end, step) for each dimension of the operand in `base`, its shape or one that splits
    and merges dimensions, and the order in which the slices of several rows are dimensions of the view.
    """

    base: tuple[int, ...]
    slices: tuple[tuple[int, int, int], ...]
    order: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> _SlicedView:
        """The view that `x.as_strided(size, stride, offset)` is. Raises PartcError P0216 if no slices give it."""
        start = 0 if offset is None else offset - int(x.storage_offset())
        units = sorted({each for each, n in zip(stride, size, strict=True) if n > 1} | {1}, reverse=True)
        bases = [(tuple(x.shape), x.stride())]
        if x.is_contiguous() and all(a % b == 0 for a, b in pairwise([x.numel(), *units])):
            bases.append((tuple(a // b for a, b in pairwise([x.numel(), *units])), tuple(units)))
        for shape, strides in bases:
            if (found := _slices(shape, strides, size, stride, start)) is not None:
                return cls(base=shape, slices=found[0], order=found[1], size=tuple(size))
        raise PartcError(
            "P0216",
            "a function that torch.func differentiates changes a view of a tensor in place, which no slices give",
            help="build the tensor with torch.cat, torch.stack or torch.where",
        )

    def read(self, x: Tensor) -> Tensor:
        x = x.reshape(self.base)
        for dim, each in enumerate(self.slices):
            x = torch.ops.aten.slice(x, dim, *each)
        return x.reshape([n for n in x.shape if n > 1]).permute(self.order).reshape(self.size)

    def written(self, x: Tensor, part: Tensor) -> Tensor:
        """`x` with another value of the view."""
        counts = [len(range(*each)) for each in self.slices]
        several = [n for n in counts if n > 1]
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        now = part.reshape([several[dim] for dim in self.order]).permute(back).reshape(counts)
        wholes = [x.reshape(self.base)]
        for dim, each in enumerate(self.slices[:-1]):
            wholes.append(torch.ops.aten.slice(wholes[-1], dim, *each))
        for dim, each in reversed([*enumerate(self.slices)]):
            now = torch.slice_scatter(wholes[dim], now, dim, *each)
        return now.reshape(x.shape)


def _slices(
    shape: Sequence[int], strides: Sequence[int], size: Sequence[int], stride: Sequence[int], start: int
) -> tuple[tuple[tuple[int, int, int], ...], tuple[int, ...]] | None:
    """Slices and order of the view of this size and stride, from `start`; None if there are none."""
    left = sorted((dim for dim, n in enumerate(size) if n > 1), key=lambda dim: -stride[dim])
    taken: dict[int, int] = {}  # dimension of the operand -> that of the view
    slices = [(0, 1, 1)] * len(shape)
    for dim in sorted(range(len(shape)), key=lambda dim: -strides[dim]):
        unit = strides[dim]
        if shape[dim] == 1 or unit == 0:
            continue
        begin, start = divmod(start, unit)
        step, rest = divmod(stride[left[0]], unit) if left else (0, 1)
        count = 1
        if step and not rest and begin + (size[left[0]] - 1) * step < shape[dim]:
            taken[dim] = left.pop(0)
            count = size[taken[dim]]
        slices[dim] = (begin, begin + (count - 1) * step + 1, max(step, 1))
        if begin >= shape[dim]:
            return None
    if left or start:
        return None
    places = sorted(taken)
    return tuple(slices), tuple(places.index(dim) for dim in sorted(places, key=taken.__getitem__))
