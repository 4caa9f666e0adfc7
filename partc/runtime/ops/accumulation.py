"""Gradient buffers with a cleared state: a step's first gradient is written instead of added to zeros.

This saves a pass that writes zeros and one that reads them. Zeros are written only where nothing was added, or where an
operation can only add.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..torch_private import foreach_add_, foreach_copy_, without_overrides


class Gradient(Tensor):
    """A parameter's gradient that records whether anything has been added since it was last cleared.

    Only the operations below use this state; for all others it is plain memory (see `materialized`).
    """

    __torch_function__ = without_overrides  # type: ignore[assignment]  # results of operations on it are plain tensors
    cleared: bool

    @staticmethod
    def of(memory: Tensor) -> Gradient:
        """A gradient in the same memory, not cleared."""
        gradient = memory.as_subclass(Gradient)
        gradient.cleared = False
        return gradient

    def add_(self, other: Any, *, alpha: Any = 1) -> Tensor:
        if alpha == 1 and first_since_clear(self):
            return self.copy_(other)
        materialized(self)
        return super().add_(other, alpha=alpha)

    def addmm_(self, rows: Any, columns: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        return super().addmm_(rows, columns, beta=0 if first_since_clear(self) else beta, alpha=alpha)

    def index_add_(self, dim: Any, index: Any, source: Any, *, alpha: Any = 1) -> Tensor:
        materialized(self)
        return super().index_add_(dim, index, source, alpha=alpha)


def in_rows(x: Tensor) -> Tensor:
    """x[*rows, d] as a matrix, which may be empty."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def clear(gradients: Iterable[Tensor]) -> None:
    """Mark the gradients as zero without writing."""
    for gradient in gradients:
        if isinstance(gradient, Gradient):
            gradient.cleared = True
        else:
            gradient.zero_()


def first_since_clear(gradient: Tensor) -> bool:
    """Whether the next gradient is the first since clearing, and so overwrites the memory; resets the mark."""
    first = isinstance(gradient, Gradient) and gradient.cleared
    if first:
        gradient.cleared = False  # type: ignore[attr-defined]
    return first


def materialized(gradient: Tensor) -> Tensor:
    """The gradient with its memory up to date: zeros are written if it is marked as zero."""
    return gradient.zero_() if first_since_clear(gradient) else gradient


def complete(gradients: Iterable[Tensor]) -> None:
    """Bring the memory of all gradients up to date."""
    for gradient in gradients:
        materialized(gradient)


def add_product(into: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Add rows[o, n] @ columns[n, i] to `into`[o, i], which may be fp32 if the factors have 16 bits."""
    if into.dtype == rows.dtype:
        into.addmm_(rows, columns)
    elif not rows.is_cuda or into.dtype != torch.float32 or not _sums_wide(rows.dtype, rows.device):
        into.add_(rows @ columns)
    elif first_since_clear(into):
        torch.mm(rows, columns, out_dtype=into.dtype, out=into)
    else:
        torch.addmm(into, rows, columns, out_dtype=into.dtype, out=into)


def add_sum(into: Tensor, parts: Tensor) -> None:
    """Add the sum over rows of `parts`[n, elements], in the precision of the parts."""
    flat = into.view(-1)
    if first_since_clear(into):
        torch.sum(parts, 0, out=flat)
    else:
        flat.add_(parts.sum(0))


def add_sums(into: Sequence[Tensor], parts: Tensor) -> None:
    """Add several sums, `parts`[buffers, n, elements], in two launches."""
    totals = parts.sum(1).unbind()
    first = [first_since_clear(each) for each in into]
    if all(first):
        foreach_copy_([each.view(-1) for each in into], totals)
    elif not any(first):
        foreach_add_([each.view(-1) for each in into], totals)
    else:
        for each, total, writes in zip(into, totals, first, strict=True):
            (each.copy_ if writes else each.add_)(total.view(each.shape))


@lru_cache
def _sums_wide(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this version of torch can add 16-bit products to fp32 on a GPU; some versions require equal types."""
    x, total = torch.zeros(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, device=device)
    try:
        torch.addmm(total, x, x, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
