"""The largest number of an integer entry as a Python number, such as the length of the longest sequence.

    longest = int(lengths.max())                             longest = 12
    hidden  = arange(longest) >= lengths[:, None]     ->     hidden  = arange(12) >= lengths[:, None]

The example batch determines the number, and packages check that every batch has the same one. A trace reads such
numbers only if the model does not trace without them. A guard on them therefore adds no check to packages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partc.frontend.by_tensor import ByTensor
from partc.frontend.permissions import LARGEST_NUMBERS, permitted
from partc.frontend.torch_call import TorchCall
from partc.torch_private import without_modes

MOST = 1 << 20  # the largest number
_EACH = frozenset({
    "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub", "mul", "__mul__", "__rmul__", "div",
    "__truediv__", "floor_divide", "__floordiv__", "true_divide", "floor", "ceil", "round", "trunc", "clamp",
    "clamp_min", "clamp_max", "to", "long", "int", "float", "double", "type", "cpu", "detach", "clone", "contiguous",
})  # fmt: skip
_LARGEST = frozenset({"max", "amax"})


@dataclass(frozen=True, slots=True)
class _Image:
    """A function of each number of an entry, or of the largest one if `reduced`."""

    entry: str
    of: Callable[[Tensor], Tensor]
    reduced: bool = False


class LargestNumbers:
    """Follows integer entries of one dimension through a trace; `integers` has their numbers in each part of the
    example batch. `read` has the largest numbers that the model has read, by entry.
    """

    def __init__(self, integers: Sequence[Mapping[str, Tensor]]) -> None:
        self._integers = integers
        self._images: ByTensor[_Image] = ByTensor()
        self.read: dict[str, int] = {}

    def enter(self, name: str, x: Tensor) -> None:
        """Follow an entry of the batch."""
        if x.dim() == 1 and not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool):
            self._images[x] = _Image(name, lambda numbers: numbers)

    def follow(self, call: TorchCall, made: Any) -> None:
        """Note the result of a call whose tensors all depend on one entry."""
        name, args, kwargs = call.name, call.args, call.kwargs
        if name in _LARGEST and isinstance(made, tuple):  # along a dimension: the numbers, and their places
            made = made[0]
        fixed = not any(isinstance(x, Tensor) for x in kwargs.values())
        if not isinstance(made, Tensor) or not fixed or name not in _EACH | _LARGEST:
            return
        images = [self._images.get(x) for x in args if isinstance(x, Tensor)]
        first = images[0] if images else None
        if first is None or any(image is None or image.entry != first.entry for image in images):
            return
        if name in _EACH:
            operands = [self._images.get(x) for x in args]
            self._images[made] = _Image(
                first.entry,
                lambda numbers: call.func(
                    *(x if image is None else image.of(numbers) for x, image in zip(args, operands, strict=True)),
                    **kwargs,
                ),
                reduced=all(image.reduced for image in images if image is not None),
            )
        elif not made.dim() and not first.reduced:
            self._images[made] = _reduced(first)

    def number(self, x: Any) -> int | float | None:
        """The value of a tensor that depends on the largest number of one entry alone; None for other tensors. The
        largest number is then in `read`.
        """
        image = self._images.get(x)
        return None if image is None or not image.reduced else self._read(image)

    def longest(self, lengths: Tensor) -> int | float | None:
        """The largest number of a tensor that depends on the numbers of one entry; None for other tensors."""
        image = self._images.get(lengths)
        return None if image is None or image.reduced else self._read(_reduced(image))

    def _read(self, image: _Image) -> int | float | None:
        if not permitted(LARGEST_NUMBERS).may():
            return None
        with without_modes():
            largest = {int(part[image.entry].max()) for part in self._integers}
            if len(largest) != 1 or not 0 <= max(largest) <= MOST:
                return None
            try:
                number: int | float = image.of(torch.arange(max(largest) + 1)).item()
            except _NotLargestError:
                return None
        self.read[image.entry] = max(largest)
        return number


class _NotLargestError(Exception):
    """The largest number does not have the largest result."""


def _reduced(image: _Image) -> _Image:
    def largest(numbers: Tensor) -> Tensor:
        made = image.of(numbers)
        if bool((made.diff() < 0).any()):
            raise _NotLargestError
        return made[-1]

    return _Image(image.entry, largest, reduced=True)
