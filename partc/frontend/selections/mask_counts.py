"""Counts of a mask's elements, and tests of them, while a model is traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from partc.frontend.by_tensor import ByTensor
from partc.frontend.selections.row_counts import TESTS_OF_ZERO

SHAPES = frozenset({"view", "reshape", "unflatten", "_unsafe_view"})
_COUNTS = frozenset({"sum", "count_nonzero"})
_NOT = frozenset({"logical_not", "bitwise_not", "__invert__", "__not__"})


class MaskCounts:
    """The tensors of a trace that count masks."""

    def __init__(self) -> None:
        self._counts: ByTensor[Tensor] = ByTensor()  # a count of a mask's elements
        self._row_counts: ByTensor[Tensor] = ByTensor()  # the counts of a matrix's rows
        self._views: ByTensor[Tensor] = ByTensor()  # reshaped mask -> mask
        # Test of a count -> its outcome for a nonzero count, and the mask.
        self._answers: ByTensor[tuple[bool, Tensor]] = ByTensor()

    def follow(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> None:
        """Follow the result of a call."""
        if not isinstance(made, Tensor) or not args or not isinstance(args[0], Tensor):
            return
        x = args[0]
        mask = x if x.dtype is torch.bool else None
        if name in SHAPES and mask is not None:
            self._views[made] = mask
        along = (*args[1:], kwargs.get("dim"))[0]
        if name in _COUNTS and mask is not None and mask.dim() == 2 and along in (1, -1) and made.dim() == 1:
            self._row_counts[made] = mask
        if made.dim():
            return
        if name == "any" and x.dim():
            self._answers[made] = True, x
        elif name in _COUNTS and mask is not None and mask.dim():
            self._counts[made] = mask
        elif (counted := self.counted(x)) is not None and len(args) == 2 and isinstance(args[1], int):
            answer = TESTS_OF_ZERO.get((name.strip("_"), args[1]))
            if answer is not None:
                self._answers[made] = answer, counted
        elif name in _NOT and (found := self.answer(x)) is not None:
            self._answers[made] = not found[0], found[1]

    def counted(self, x: Any) -> Tensor | None:
        """The mask whose elements a tensor counts."""
        return self._counts.get(x)

    def counted_by_row(self, x: Any) -> Tensor | None:
        """The matrix whose rows a tensor counts."""
        return self._row_counts.get(x)

    def whole(self, mask: Tensor) -> Tensor:
        """The mask that this one is a reshape of; the mask itself if it is none."""
        found = self._views.get(mask)
        return mask if found is None else found

    def answer(self, x: Any) -> tuple[bool, Tensor] | None:
        """The outcome of a test if its mask selects anything, and the mask; None for other tensors."""
        return self._answers.get(x)
