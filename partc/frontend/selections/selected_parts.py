"""Parts of a tensor by data-dependent counts, while a model is traced: x.split(counts.tolist())."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from partc.frontend.by_tensor import ByTensor
from partc.frontend.selections.mask_counts import MaskCounts
from partc.frontend.selections.row_counts import PartSize, unknown_number
from partc.frontend.selections.selected_rows import SelectedRows


class SelectedParts:
    """Represents each part as a selection of rows: those with the part's number."""

    def __init__(
        self, rows: SelectedRows, counts: MaskCounts, nonempty: Callable[[Tensor, int, int], Sequence[int]]
    ) -> None:
        """`nonempty` returns the parts of a range without those that tests have found empty."""
        self._rows, self._counts, self._nonempty = rows, counts, nonempty
        # An element of integers, which may be counts -> the integers, its index.
        self._listed: ByTensor[tuple[Tensor, int]] = ByTensor()
        self._sums: ByTensor[Tensor] = ByTensor()  # counts.cumsum(0) -> counts
        self._parts: dict[tuple[int, int], tuple[Tensor, Sequence[Tensor]]] = {}  # counts, and each part's mask
        # Rows of one example -> all rows, the example's number.
        self._examples: ByTensor[tuple[Tensor, int]] = ByTensor()

    def follow(self, counts: Tensor, made: Any, index: tuple[Any, ...]) -> None:
        """Follow the elements of a list of integers."""
        for part, x in enumerate(made if isinstance(made, tuple) else (made,)):
            if not x.dim() and all(isinstance(number, int) for number in index):
                number = part if isinstance(made, tuple) else index[0] % len(counts)
                self._listed[x] = counts, number

    def sum_up(self, counts: Tensor, made: Tensor) -> None:
        """Note that `made` has the cumulative sums of integers, which may be counts: the ends of parts."""
        self._sums[made] = counts

    def listed(self, x: Any) -> tuple[Tensor, int, int] | None:
        """The integers of which a number is the sum, and the indices of the first one and behind the last; None for
        other numbers.
        """
        found = self._listed.get(x)
        if found is None:
            return None
        numbers, place = found
        counts = self._sums.get(numbers)
        return (numbers, place, place + 1) if counts is None else (counts, 0, place + 1)

    def _masks(self, counts: Tensor, rows: int) -> Sequence[Tensor]:
        """For each count, a mask of its rows."""
        found = self._parts.get((id(counts), rows))
        if found is None:
            numbers = torch.repeat_interleave(counts, output_size=rows)
            found = counts, [numbers == number for number in range(len(counts))]
            self._parts[id(counts), rows] = found
        return found[1]

    def divided(self, x: Tensor, sizes: Any, dim: int) -> Any:
        """x.split(counts.tolist(), dim)."""
        if not isinstance(sizes, tuple | list) or not any(isinstance(size, PartSize) for size in sizes):
            return NotImplemented
        counts = next(size.counts for size in sizes if isinstance(size, PartSize))
        own = [isinstance(size, PartSize) and size.counts is counts and size.first for size in sizes]
        if own != [*range(len(counts))] or any(size.last != size.first + 1 for size in sizes):
            raise unknown_number()
        if not dim % x.dim() and (parts := self._of_examples(x, counts)) is not None:
            return parts
        before = (slice(None),) * (dim % x.dim())
        masks = self._masks(counts, x.shape[dim])
        return tuple(self._rows.selected(x, (*before, *self._rows.places(mask))) for mask in masks)

    def _of_examples(self, x: Tensor, counts: Tensor) -> tuple[Tensor, ...] | None:
        """Selected rows divided by example: the mask has a row for each example, and `counts` are its row sums."""
        held, counted = self._rows.of(x), self._counts.counted_by_row(counts)
        if held is None or held.dim or counted is None or held.mask is not self._counts.whole(counted):
            return None
        parts = []
        rows = zip(held.only(x).split(counted.shape[1]), counted.unbind(0), strict=True)
        for number, (some, mask) in enumerate(rows):
            parts.append(self._rows.selected(some, mask))
            self._examples[parts[-1]] = x, number
        return tuple(parts)

    def reshaped(self, x: Tensor, made: Tensor) -> None:
        """Note that `made` has the rows of one example in another shape."""
        example = self._examples.get(x)
        if example is not None:
            self._examples[made] = example

    def _all_examples(self, parts: Sequence[Any]) -> Tensor | None:
        """The rows of all examples in order, reshaped if every example's rows were reshaped alike; None for other
        parts.
        """
        found = [self._examples.get(part) for part in parts]
        x = found[0][0] if found and found[0] is not None else None
        if x is None or any(known is None or known[0] is not x or known[1] != at for at, known in enumerate(found)):
            return None
        if sum(part.numel() for part in parts) != x.numel():
            return None
        inner = parts[0].shape[1:]
        if any(part.shape[1:] != inner for part in parts):
            return None
        return x if x.shape[1:] == inner else self._rows.merged(x, (-1, *inner))

    def with_places(self, x: Tensor, index: Any) -> Any:
        """An index in which the slice of a part, start : start + count, is replaced by the part's places."""
        items = index if isinstance(index, tuple) else (index,)
        ends = [
            [isinstance(end, PartSize) for end in (item.start, item.stop)] if isinstance(item, slice) else [False]
            for item in items
        ]
        if not any(map(any, ends)):
            return index
        dim = next(dim for dim, each in enumerate(ends) if any(each))
        start, stop = items[dim].start, items[dim].stop
        counts = (stop if isinstance(stop, PartSize) else start).counts
        first = start.last if isinstance(start, PartSize) else 0 if start in (None, 0) else None
        last = stop.last if isinstance(stop, PartSize) else len(counts) if stop is None else None
        parts = [] if first is None or last is None else self._nonempty(counts, first, last)
        if (
            len(parts) != 1
            or any(self._nonempty(counts, 0, end.first) for end in (start, stop) if isinstance(end, PartSize))
            or items[dim].step is not None
            or not all(isinstance(item, slice) for item in items[:dim])
        ):
            raise unknown_number()
        places = self._rows.places(self._masks(counts, x.shape[dim])[parts[0]])
        return (*items[:dim], *places, *items[dim + 1 :])

    def joined(self, parts: Sequence[Any], dim: int) -> Any:
        """The concatenation of all parts of a tensor's rows, in order."""
        if not dim and (whole := self._all_examples(parts)) is not None:
            return whole
        held = [self._rows.of(x) for x in parts]
        masks = [each.mask for each in held if each is not None]
        for _, known in self._parts.values():
            if len(known) == len(masks) == len(held) and all(a is b for a, b in zip(masks, known, strict=True)):
                break
        else:
            return NotImplemented
        if any(each is None or each.dim or dim % x.dim() for each, x in zip(held, parts, strict=True)):
            return NotImplemented
        made = torch.zeros_like(parts[0])
        for mask, x in zip(masks, parts, strict=True):
            made = torch.index_put(made, self._rows.places(mask), x)
        return made
