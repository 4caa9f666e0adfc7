"""Sparse gradients of embedding tables: the rows that lookups read, without a buffer of the table's size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TouchedRows:
    """Gradients of rows, as lookups return them: `values`[k, d] for the rows `numbers`[k]."""

    numbers: Tensor
    values: Tensor

    def __add__(self, other: TouchedRows) -> TouchedRows:
        return TouchedRows(torch.cat((self.numbers, other.numbers)), torch.cat((self.values, other.values)))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class RowGradient:
    """The gradient of a table[n, d], as rows with numbers: first as lookups return them, later summed by number.

    Rows without memory (in the memory account) count as if ids were spread evenly over the ranks that hold rows.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.shape, self.dtype, self.device = parameter.shape, parameter.dtype, parameter.device
        self._numbers: list[Tensor] = []
        self._values: list[Tensor] = []
        self._summed = False  # whether every number occurs only once

    def add_(self, rows: TouchedRows) -> None:
        self._numbers.append(rows.numbers)
        self._values.append(rows.values.to(self.dtype))
        self._summed = False

    def zero_(self) -> RowGradient:
        self._numbers.clear()
        self._values.clear()
        self._summed = False
        return self

    def div_(self, divisor: float | Tensor) -> None:
        self._sum().div_(divisor)

    def mul_(self, factor: float | Tensor) -> None:
        self._sum().mul_(factor)

    def norm(self) -> Tensor:
        """The norm of the gradient, in fp64."""
        norm: Tensor = torch.linalg.vector_norm(self._sum(), dtype=torch.float64)
        return norm

    def sparse(self) -> Tensor:
        """A sparse tensor, as torch's optimizers read it."""
        self._sum()
        return torch.sparse_coo_tensor(
            self._numbers[0][None], self._values[0], self.shape, is_coalesced=True, check_invariants=False
        )

    def dense(self) -> Tensor:
        """A new tensor of the table's size."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device).index_add_(
            0, self.touched(), self._values[0]
        )

    def summed(self) -> Tensor:
        """The summed gradients of the touched rows, [rows, d]."""
        return self._sum()

    def touched(self) -> Tensor:
        """The numbers of the touched rows, each once."""
        self._sum()
        return self._numbers[0]

    def narrow(self, dim: int, start: int, length: int) -> RowGradient:
        """The gradient of a range of the table's rows; it is summed together with the whole."""
        return _Part(self, start, length)

    def _sum(self) -> Tensor:
        """Sum rows with equal numbers, in the order in which they were added."""
        if self._summed:
            return self._values[0]
        if self._values:
            numbers, values = _joined(self._numbers), _joined(self._values)
        else:
            numbers = torch.empty(0, dtype=torch.int64, device=self.device)
            values = torch.empty(0, *self.shape[1:], dtype=self.dtype, device=self.device)
        if numbers.is_meta:
            once, total = torch.empty_like(numbers), torch.empty_like(values)
        elif len(numbers):
            ordered, order = numbers.sort(stable=True)
            once, counts = ordered.unique_consecutive(return_counts=True)
            total = torch.embedding_bag(values, order, counts.cumsum(0) - counts)[0]  # sums of neighbours
        else:
            once, total = numbers, values
        self._numbers, self._values, self._summed = [once], [total], True
        return total


class _Part(RowGradient):
    """The gradient of some rows of a table."""

    def __init__(self, whole: RowGradient, start: int, length: int) -> None:
        super().__init__(torch.empty(length, *whole.shape[1:], dtype=whole.dtype, device="meta"))
        self.device, self._whole, self._start, self._rows = whole.device, whole, start, whole.shape[0]

    def add_(self, rows: TouchedRows) -> None:
        self._whole.add_(TouchedRows(rows.numbers + self._start, rows.values))

    def zero_(self) -> RowGradient:
        self._whole.zero_()
        return self

    def _sum(self) -> Tensor:
        numbers, (length, *_) = self._whole.touched(), self.shape
        if numbers.is_meta:
            first, last = 0, -(-len(numbers) * length // self._rows)
        else:
            ends = numbers.new_tensor((self._start, self._start + length))
            first, last = torch.searchsorted(numbers, ends).tolist()
        self._numbers = [numbers[first:last] - self._start]
        self._values = [self._whole.summed()[first:last]]
        return self._values[0]
