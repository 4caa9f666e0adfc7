"""`as_strided` views that are overlapping windows of rows, as `unfold` returns them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor


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
