"""Weights that are different tensors in one memory.

decoder.weight = encoder.weight                     one weight of two names: a tie
decoder.weight.data = encoder.weight.data           two weights, each of which the optimizer updates in place
q, k = (nn.Parameter(x) for x in both.split(8))     two weights side by side, which do not meet
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor, nn

from partc.runtime.torch_private import storage_key

LARGEST = 1 << 24  # elements whose places are compared one by one


def shared_with(model: nn.Module) -> tuple[str, str] | None:
    """The names of a trained weight and another tensor of the model that have elements in common."""
    groups: dict[int, list[tuple[str, Tensor]]] = {}
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.numel():
            groups.setdefault(storage_key(x), []).append((name, x))
    for group in groups.values():
        for (one, x), (other, y) in combinations(group, 2):
            if (x.requires_grad or y.requires_grad) and _meet(x, y):
                return (one, other) if x.requires_grad else (other, one)
    return None


def _meet(x: Tensor, y: Tensor) -> bool:
    (first, last), (low, high) = _span(x), _span(y)
    if last < low or high < first:
        return False
    if x.numel() + y.numel() > LARGEST or x.dtype != y.dtype:
        return True
    return bool(torch.isin(_places(x), _places(y)).any())


def _span(x: Tensor) -> tuple[int, int]:
    """The first and the last place in bytes."""
    first, size = int(x.storage_offset()), x.element_size()
    last = first + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return first * size, (last + 1) * size - 1


def _places(x: Tensor) -> Tensor:
    found = torch.tensor(x.storage_offset())
    for size, stride in zip(x.shape, x.stride(), strict=True):
        found = found.unsqueeze(-1) + torch.arange(size) * stride
    return found
