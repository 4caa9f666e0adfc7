"""The loss of a head with logits in chunks of rows, one in memory at a time.

Shapes: x[*rows, d], weight[c, d] and bias[c] of this rank's classes, labels[*rows]. Rows are computed as
runtime/ops/functional.py computes whole logits: sums are in at least fp32. If the package has kernels for it, they read
the product's logits and overwrite them with their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .accumulation import add_product, in_rows

LINE = 64  # elements to which rows of logits are aligned for kernels: 128 bytes in 16 bits

# (logits[rows, c], labels[rows], outputs with one number per row).
Pieces = Callable[[Tensor, Tensor, Sequence[Tensor]], None]
# (gradient of losses[rows], logits, labels, lse) -> gradient of logits.
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class _Products:
    """Computes logits of chunks of rows; with `even`, all chunks use the same memory, with aligned rows."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, even: bool) -> None:
        self._weight, self._bias = weight, bias
        rows = x.shape[:-1].numel()
        most = -(-rows // min(chunks, max(1, rows)))
        classes = len(weight)
        self._memory = x.new_empty(most, -(-classes // LINE) * LINE)[:, :classes] if even else None

    def of(self, rows: Tensor) -> Tensor:
        if self._memory is None:
            return F.linear(rows, self._weight, self._bias)
        logits = self._memory[: len(rows)]
        if self._bias is None:
            return torch.mm(rows, self._weight.t(), out=logits)
        return torch.addmm(self._bias, rows, self._weight.t(), out=logits)


def rows_of_logits(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    chunks: int,
    ask: Pieces,
    made: Sequence[Tensor],
    *,
    even: bool,
) -> None:
    """Write the results of `ask` for all rows into tensors like `labels`."""
    products = _Products(x, weight, bias, chunks, even)
    for rows, own, *found in zip(*_cut(chunks, x, labels, *made), strict=True):
        ask(products.of(rows), own, found)


def gradients_of_logits(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    chunks: int,
    gradient: Gradient,
    into: Tensor | None,
    bias_into: Tensor | None,
    *,
    even: bool,
) -> Tensor:
    """The gradient of x; those of weight and bias are added to `into` and to `bias_into`, if there are any."""
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    products = _Products(x, weight, bias, chunks, even)
    cut = _cut(chunks, x, labels, grad, lse)
    for rows, own, grad_rows, lse_rows, made in zip(*cut, *_cut(chunks, grad_x), strict=True):
        grad_logits = gradient(grad_rows, products.of(rows), own, lse_rows)
        torch.mm(grad_logits, weight, out=made)
        if into is not None:
            add_product(into, grad_logits.t(), rows)
        if bias_into is not None:
            bias_into.add_(grad_logits.sum(0))
        del grad_logits
    return grad_x


def _cut(chunks: int, x: Tensor, *per_row: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The rows of `x` in `chunks` parts of nearly equal size."""
    flat = in_rows(x)
    for tensor in (flat, *(other.reshape(-1) for other in per_row)):
        yield tensor.tensor_split(min(chunks, max(1, len(flat))))
