"""The loss of a head whose logits are made in chunks of rows, of which one is in memory at a time.

Shapes: x[*rows, d], weight[c, d] and bias[c] of this rank's classes, labels[*rows]. What is asked of a row is what
runtime/functional.py asks of whole logits, so sums are in fp32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .accumulation import add_product

Pieces = Callable[[Tensor, Tensor], Sequence[Tensor]]  # logits[rows, c], labels[rows] -> a number for each row, each
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of losses[rows], logits, labels, lse -> of logits


def rows_of_logits(
    x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, chunks: int, ask: Pieces
) -> list[Tensor]:
    """What `ask` says of all rows, each like `labels`."""
    found = [ask(F.linear(rows, weight, bias), own) for rows, own in zip(*_cut(chunks, x, labels), strict=True)]
    return [torch.cat(parts).view(labels.shape) for parts in zip(*found, strict=True)]


def gradients_of_logits(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    chunks: int,
    gradient: Gradient,
    into: Tensor,
    bias_into: Tensor | None,
) -> Tensor:
    """The gradient of x; that of weight is added to `into`, and that of bias to `bias_into`, if there is one."""
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cut = _cut(chunks, x, labels, grad, lse)
    for rows, own, grad_rows, lse_rows, made in zip(*cut, *_cut(chunks, grad_x), strict=True):
        grad_logits = gradient(grad_rows, F.linear(rows, weight, bias), own, lse_rows)
        torch.mm(grad_logits, weight, out=made)
        add_product(into, grad_logits.t(), rows)
        if bias_into is not None:
            bias_into.add_(grad_logits.sum(0))
        del grad_logits
    return grad_x


def _cut(chunks: int, x: Tensor, *per_row: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows in as many parts, of nearly equal size."""
    flat = x.reshape(-1, x.shape[-1])
    for tensor in (flat, *(other.reshape(-1) for other in per_row)):
        yield tensor.tensor_split(min(chunks, max(1, len(flat))))
