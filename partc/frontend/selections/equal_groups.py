"""Equal numbers of selected rows in all examples, while a model is traced: rows.view(examples, -1, width)[:, -1].

A guard compares the counts of a mask's rows, which have one value if they are equal:

    counts = mask.sum(1)
    if len(torch.unique_consecutive(counts)) > 1: raise ValueError(...)
    last = x[mask].view(len(x), -1, width)[:, -1]     last = where(place of the last, x, 0).sum(1)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partc.frontend.by_tensor import ByTensor
from partc.frontend.selections.mask_counts import MaskCounts
from partc.frontend.selections.row_counts import unknown_number
from partc.frontend.selections.selected_rows import SelectedRows, leaves


class EqualGroups:
    """Represents the selected rows of each example by all its rows; the model reads one of them by its number."""

    def __init__(self, rows: SelectedRows, counts: MaskCounts) -> None:
        self._rows, self._counts = rows, counts
        self._equal: ByTensor[bool] = ByTensor()  # masks whose row counts a guard compares
        self._groups: ByTensor[Tensor] = ByTensor()  # rows by example -> mask

    def distinct(self, x: Tensor) -> Tensor:
        """torch.unique_consecutive of a vector: the elements that differ from the previous one."""
        counted = self._counts.counted_by_row(x)
        if counted is not None:
            self._equal[counted] = True
        return self._rows.selected(x, torch.cat([torch.ones_like(x[:1], dtype=torch.bool), x[1:] != x[:-1]]))

    def grouped(self, x: Tensor, shape: tuple[Any, ...]) -> Any:
        """Selected rows as x.view(examples, -1, …); NotImplemented for other shapes."""
        held = self._rows.of(x)
        if held is None or held.dim or held.mask.dim() != 2 or held.mask not in self._equal:
            return NotImplemented
        if len(shape) != x.dim() + 1 or shape[0] != len(held.mask) or tuple(shape[2:]) != tuple(x.shape[1:]):
            return NotImplemented
        made = held.only(x).reshape(*held.mask.shape, *x.shape[1:])
        self._groups[made] = held.mask
        return made

    def read(self, x: Tensor, index: Any) -> Any:
        """x[:, number, …] of grouped rows; a negative number counts from the end. NotImplemented for other tensors."""
        mask = self._groups.get(x)
        if mask is None:
            return NotImplemented
        items = index if isinstance(index, tuple) else (index,)
        number = items[1] if len(items) > 1 and items[0] == slice(None) else None
        if not isinstance(number, int) or isinstance(number, bool):
            raise unknown_number()
        place = mask.cumsum(1) - 1
        wanted = mask & (place == (number if number >= 0 else mask.sum(1, keepdim=True) + number))
        row = torch.where(wanted.reshape(*wanted.shape, *(1 for _ in x.shape[2:])), x, 0).sum(1)
        return row[(slice(None), *items[2:])]

    def check(self, operands: Any) -> None:
        """Raise PartcError P0206 for any other use of grouped rows."""
        if self._groups and any(x in self._groups for x in leaves(operands)):
            raise unknown_number()
