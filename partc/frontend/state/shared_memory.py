"""Weights, buffers and entries of the batch that are different tensors in the same memory.

decoder.weight = encoder.weight                     one weight of two names: a tie
decoder.weight.data = encoder.weight.data           two weights, each of which the optimizer updates in place
q, k = (nn.Parameter(x) for x in both.split(8))     two weights side by side, which do not overlap
self.cos = self.table[0]                            two buffers, neither of which forward may change in place
{"ids": text[:, :-1], "labels": text[:, 1:]}        two entries of the batch, likewise
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

import torch
from torch import Tensor, nn

from partc.runtime.torch_private import storage_key
from partc.runtime.train.plain_tensors import named_tensors

LARGEST = 1 << 24  # the most elements whose addresses are compared one by one

Pair = tuple[tuple[str, Tensor], tuple[str, Tensor]]


def shared_with(pairs: Iterable[Pair]) -> tuple[str, str] | None:
    """The names of a trained weight and another tensor that have elements in common."""
    for (one, x), (other, y) in pairs:
        if (x.requires_grad or y.requires_grad) and _overlap(x, y):
            return (one, other) if x.requires_grad else (other, one)
    return None


def untrained_pairs(pairs: Iterable[Pair]) -> dict[str, str]:
    """The names of tensors that are not trained, each with another one that has elements in common with it."""
    found: dict[str, str] = {}
    for (one, x), (other, y) in pairs:
        if not (x.requires_grad or y.requires_grad) and _overlap(x, y):
            found |= {one: other, other: one}
    return found


def module_pairs(modules: Mapping[str, nn.Module]) -> list[Pair]:
    """The pairs of parameters and buffers of modules that are in one memory, with their names."""
    return pairs_in_memory(named_tensors(modules, "_parameters"), named_tensors(modules, "_buffers"))


def pairs_in_memory(*tables: Mapping[str, Tensor]) -> list[Pair]:
    """The pairs of tensors that are in one memory, with their names."""
    first: dict[int, tuple[str, Tensor]] = {}
    groups: dict[int, list[tuple[str, Tensor]]] = {}
    for named in tables:
        for name, x in named.items():
            key = storage_key(x)
            if key not in first:
                first[key] = name, x
            elif x.numel():
                groups.setdefault(key, [first[key]] if first[key][1].numel() else []).append((name, x))
    return [pair for group in groups.values() for pair in combinations(group, 2)]


def _overlap(x: Tensor, y: Tensor) -> bool:
    (first, last), (low, high) = _span(x), _span(y)
    if last < low or high < first:
        return False
    if x.numel() + y.numel() > LARGEST or x.dtype != y.dtype:
        return True
    return bool(torch.isin(_places(x), _places(y)).any())


def _span(x: Tensor) -> tuple[int, int]:
    """The first and last byte address of a tensor's elements."""
    first, size = int(x.storage_offset()), x.element_size()
    last = first + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return first * size, (last + 1) * size - 1


def _places(x: Tensor) -> Tensor:
    found = torch.tensor(x.storage_offset())
    for size, stride in zip(x.shape, x.stride(), strict=True):
        found = found.unsqueeze(-1) + torch.arange(size) * stride
    return found
