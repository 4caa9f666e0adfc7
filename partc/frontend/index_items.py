"""The dimensions that the items of an index take: in x[:, None, ..., i], `i` takes the last one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def with_dims(items: Sequence[Any], rank: int) -> Iterator[tuple[Any, int]]:
    """Each item of an index of a tensor with `rank` dimensions, with the first dimension that the item takes."""
    dim = 0
    for place, item in enumerate(items):
        yield item, dim
        dim = rank - sum(map(_count, items[place + 1 :])) if item is Ellipsis else dim + _count(item)


def _count(item: Any) -> int:
    """The number of dimensions that an item takes."""
    if item is None or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype is torch.bool else 1
