"""Reductions of bags of rows: bag b has the rows from starts[b] to ends[b], and bag b + 1 begins where bag b ends.

Rows outside all bags do not count.

Shapes: rows[n, d], starts[b] and ends[b] -> [b, d]. A bag without rows is zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .attention import row_dtype


def bag_sum(rows: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """The sum of each bag's rows, computed in at least fp32."""
    count, wide = starts.shape[0], row_dtype(rows)
    sums = rows.new_zeros(count + 1, rows.shape[1], dtype=wide)
    return sums.index_add_(0, _bags(rows.shape[0], starts, ends), rows.to(wide))[:count].to(rows.dtype)


def bag_sum_grad(grad: Tensor, starts: Tensor, ends: Tensor, count: int) -> Tensor:
    """Gradients of `count` rows, from the gradient of `bag_sum`'s result."""
    return torch.cat((grad, grad.new_zeros(1, grad.shape[1])))[_bags(count, starts, ends)]


def bag_max(rows: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """The maximum of each bag's rows; zero for a bag whose rows are all -inf."""
    most = _maxima(rows, _bags(rows.shape[0], starts, ends), starts.shape[0])[:-1]
    return most.masked_fill_(most == -math.inf, 0)


def bag_max_grad(grad: Tensor, rows: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Gradients of rows, from the gradient of `bag_max`'s result; among equal rows, the first one gets it."""
    (count, width), bags = rows.shape, _bags(rows.shape[0], starts, ends)
    most = _maxima(rows, bags, starts.shape[0])
    places = torch.arange(count, device=rows.device)[:, None].expand(count, width)
    best = (rows == most[bags]) & (rows != -math.inf)
    first = places.new_full(most.shape, count)
    first.scatter_reduce_(0, bags[:, None].expand(count, width), places.masked_fill(~best, count), "amin")
    return grad.new_zeros(count + 1, width).scatter_(0, first[:-1], grad)[:-1]


def _maxima(rows: Tensor, bags: Tensor, count: int) -> Tensor:
    most = rows.new_full((count + 1, rows.shape[1]), -math.inf)
    return most.scatter_reduce_(0, bags[:, None].expand(rows.shape), rows, "amax")


def _bags(count: int, starts: Tensor, ends: Tensor) -> Tensor:
    """The index of each row's bag; the number of bags for rows outside all bags."""
    places = torch.arange(count, device=starts.device, dtype=starts.dtype)
    bags = torch.searchsorted(ends, places, right=True)
    began = starts[bags.clamp(max=starts.shape[0] - 1)] <= places
    return bags.masked_fill_(~began, starts.shape[0])
