"""Products of rows with the matrices of the experts that they are routed to.

Shapes: x[s, i] rows, experts[s] the expert of each row, w[e, i, o] a matrix for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .accumulation import settled


def expert_matmul(x: Tensor, experts: Tensor, w: Tensor) -> Tensor:
    """Each row times the matrix of its expert: [s, o]."""
    if _grouped(x):
        order, ends = _sorted(experts, w.shape[0])
        out = x.new_empty(x.shape[0], w.shape[2])
        out[order] = torch.nn.functional.grouped_mm(x[order], w, offs=ends)
        return out
    out = x.new_empty(x.shape[0], w.shape[2])
    for expert, rows in _rows(experts, w.shape[0]):
        out[rows] = x[rows] @ w[expert]
    return out


def expert_matmul_grad_rows(grad: Tensor, experts: Tensor, w: Tensor) -> Tensor:
    """Gradient of x, from that of the product [s, o]."""
    return expert_matmul(grad, experts, w.mT)


def expert_matmul_grad_weight(grad: Tensor, experts: Tensor, x: Tensor, count: int) -> Tensor:
    """Gradient of w for `count` experts; zero for those without rows."""
    into = x.new_zeros(count, x.shape[1], grad.shape[1])
    expert_matmul_add_grad_weight(into, grad, experts, x)
    return into


def expert_matmul_add_grad_weight(into: Tensor, grad: Tensor, experts: Tensor, x: Tensor) -> None:
    """The same, added to `into`."""
    settled(into)  # experts without rows add nothing
    for expert, rows in _rows(experts, into.shape[0]):
        if into.dtype == x.dtype:
            into[expert].addmm_(x[rows].mT, grad[rows])
        else:
            into[expert].add_(x[rows].mT @ grad[rows])


def _rows(experts: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    """Each expert that has rows, with the indices of its rows."""
    order, ends = _sorted(experts, count)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, order[start:end]
        start = end


def _sorted(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The rows in the order of their experts, and the end of each expert's rows."""
    order = experts.argsort(stable=True)
    ends = torch.searchsorted(
        experts[order], torch.arange(count, device=experts.device, dtype=experts.dtype), right=True
    )
    return order, ends.to(torch.int32)


def _grouped(x: Tensor) -> bool:
    """Whether torch has one kernel for all experts."""
    return x.is_cuda and x.dtype == torch.bfloat16 and hasattr(torch.nn.functional, "grouped_mm")
