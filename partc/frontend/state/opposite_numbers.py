"""Numbers whose comparisons have the opposite outcome: they show branches that a counter takes in a later step.

self.n += 1                       n is 1 in the first trace, 2 in the second
if self.n > 100:                  false in both; true for an opposite number
    loss = loss + extra
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_LONGEST = 10_000  # comparisons of a trace; a loop on an opposite number may never end
_ARITHMETIC = (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__mod__", "__rmod__", "__floordiv__",
    "__rfloordiv__", "__truediv__", "__rtruediv__", "__pow__", "__neg__", "__pos__", "__abs__",
)  # fmt: skip
_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__bool__")


def opposite(value: float, left: Iterator[int] | None = None) -> Any:
    """The number as an object whose comparisons have the opposite outcome, as have those of numbers computed from it.

    `left` has an item for each comparison that may still be made; the next one raises StopIteration.
    """
    made: Any = (OppositeInt if isinstance(value, int) else OppositeFloat)(value)
    made.left = iter(range(_LONGEST)) if left is None else left
    return made


class OppositeInt(int):
    """An integer whose comparisons have the opposite outcome."""

    left: Iterator[int]
    __hash__ = int.__hash__


class OppositeFloat(float):
    """A number whose comparisons have the opposite outcome."""

    left: Iterator[int]
    __hash__ = float.__hash__


def _arithmetic(plain: type, name: str) -> Callable[..., Any]:
    def run(self: Any, *others: Any) -> Any:
        made = getattr(plain, name)(plain(self), *others)
        if made is NotImplemented and isinstance(others[0], float):
            made = getattr(float, name)(float(self), *others)
        return opposite(made, self.left) if isinstance(made, int | float) else made

    return run


def _comparison(plain: type, name: str) -> Callable[..., Any]:
    def run(self: Any, *others: Any) -> Any:
        found = getattr(plain, name)(plain(self), *others)
        if found is NotImplemented and isinstance(others[0], float):
            found = getattr(float, name)(float(self), *others)
        if found is NotImplemented:
            return found
        next(self.left)
        return not found

    return run


for _kind, _plain in ((OppositeInt, int), (OppositeFloat, float)):
    for _name in _ARITHMETIC:
        setattr(_kind, _name, _arithmetic(_plain, _name))
    for _name in _COMPARISONS:
        setattr(_kind, _name, _comparison(_plain, _name))
