"""Elements selected by two indices in adjacent dimensions, such as products of all pairs of vectors.

Shapes: first[k], second[k]; x[*before, n, m, *after] with n at `dim`. A single index into n·m reads and writes rows of
`after`; torch's CPU kernels for two indices work element by element.
"""

from __future__ import annotations

import torch
from torch import Tensor


def index_pairs(x: Tensor, dim: int, first: Tensor, second: Tensor) -> Tensor:
    """x[:, …, first, second]: [*before, k, *after]."""
    if _torchs(x):
        return x[(slice(None),) * dim + (first, second)]
    return x.flatten(dim, dim + 1).index_select(dim, _joint(x, dim, first, second))


def index_pairs_add(x: Tensor, dim: int, first: Tensor, second: Tensor, values: Tensor) -> Tensor:
    """x with `values` added at these pairs; values of equal pairs are added in order."""
    if _torchs(x):
        return x.index_put([*[None] * dim, first, second], values, accumulate=True)
    return x.flatten(dim, dim + 1).index_add(dim, _joint(x, dim, first, second), values).view(x.shape)


def _torchs(x: Tensor) -> bool:
    """Whether torch's kernel is as fast."""
    return x.is_cuda or torch.compiler.is_compiling()


def _joint(x: Tensor, dim: int, first: Tensor, second: Tensor) -> Tensor:
    """One index into both dimensions joined; a pair with an index out of bounds becomes n·m, which torch rejects."""
    n, m = x.shape[dim : dim + 2]
    first, second = torch.where(first < 0, first + n, first), torch.where(second < 0, second + m, second)
    inside = (first >= 0) & (first < n) & (second >= 0) & (second < m)
    return torch.where(inside, first * m + second, n * m)
