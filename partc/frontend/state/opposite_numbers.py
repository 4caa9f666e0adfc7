"""Numbers whose comparisons have the opposite outcome: they show branches that a counter takes in a later step.

self.n += 1                       n is 1 in the first trace, 2 in the second
if self.n > 100:                  false in both; true for an opposite number
    loss = loss + extra
if self.n in {50, 100}:           a lookup, which no opposite number decides: its line is noted
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from partc.errors import Source
from partc.frontend.statements import only_written
from partc.installed import is_machinery, line_of

_LONGEST = 10_000  # comparisons of a trace; a loop on an opposite number may never end
_COMPUTING = (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__mod__", "__rmod__", "__floordiv__",
    "__rfloordiv__", "__truediv__", "__rtruediv__", "__pow__", "__neg__", "__pos__", "__abs__", "__round__",
    "__floor__", "__ceil__", "__trunc__",
)  # fmt: skip
_OF_BITS = ("__and__", "__rand__", "__or__", "__ror__", "__xor__", "__rxor__", "__lshift__", "__rshift__", "__invert__")
_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__bool__")
_TEXTS = ("__str__", "__repr__", "__format__")


@dataclass(slots=True)
class Uses:
    """The uses of opposite numbers in a trace that their comparisons do not show."""

    left: Iterator[int] = field(default_factory=lambda: iter(range(_LONGEST)))  # an item for each further comparison
    lines: dict[Source, CodeType] = field(default_factory=dict)  # of lookups and texts
    made: list[tuple[Any, Source, CodeType]] = field(default_factory=list)  # numbers that nothing has used yet

    lengths: set[int] = field(default_factory=set)  # identities of containers whose lengths are opposite

    def length(self, x: Any, frame: FrameType) -> int:
        """Python's `len` as traces have it, opposite for these containers."""
        if id(x) not in self.lengths:
            return x.size(0) if isinstance(x, Tensor) and x.dim() else len(x)
        made: int = made_at(frame, len(x), self)
        return made

    def note(self, frame: FrameType) -> None:
        """Note a lookup or a text, unless its statement only writes it, as into a log."""
        if not is_machinery(frame.f_code.co_filename) and not only_written(frame):
            self.lines.setdefault(line_of(frame), frame.f_code)

    def unseen(self, kept: Set[int]) -> dict[Source, CodeType]:
        """The lines of all noted uses, and of numbers that only C code may have read, such as indices of lists.

        Numbers whose identities are in `kept` are state of the next step.
        """
        return self.lines | {line: code for made, line, code in self.made if not made.used and id(made) not in kept}


def numbers_in(constants: Iterable[Any]) -> Iterator[float]:
    """The numbers among the constants of code, also in tuples and sets."""
    for each in constants:
        if isinstance(each, tuple | frozenset):
            yield from numbers_in(each)
        elif isinstance(each, int | float) and not isinstance(each, bool):
            yield each


def opposite(value: float, uses: Uses) -> Any:
    """The number as an object whose comparisons have the opposite outcome, as have those of numbers computed from it.

    When no comparison is left, the next one raises StopIteration.
    """
    made: Any = (OppositeInt if isinstance(value, int) else OppositeFloat)(value)
    made.uses, made.used = uses, False
    return made


class OppositeInt(int):
    """An integer whose comparisons have the opposite outcome."""

    uses: Uses
    used: bool


class OppositeFloat(float):
    """A number whose comparisons have the opposite outcome."""

    uses: Uses
    used: bool


def _plain(plain: type, self: Any, name: str, others: tuple[Any, ...]) -> Any:
    if not is_machinery(sys._getframe(2).f_code.co_filename):
        self.used = True
    found = getattr(plain, name)(plain(self), *others)
    if found is NotImplemented and others and isinstance(others[0], float):
        return getattr(float, name)(float(self), *others)
    return found


def _computing(plain: type, name: str) -> Callable[..., Any]:
    def run(self: Any, *others: Any) -> Any:
        found = _plain(plain, self, name, others)
        if not isinstance(found, int | float):
            return found
        return made_at(sys._getframe(1), found, self.uses)

    return run


def _comparison(plain: type, name: str) -> Callable[..., Any]:
    def run(self: Any, *others: Any) -> Any:
        found = _plain(plain, self, name, others)
        if found is NotImplemented:
            return found
        next(self.uses.left)
        return not found

    return run


def _lookup(plain: type, name: str) -> Callable[..., Any]:
    def run(self: Any, *others: Any) -> Any:
        self.uses.note(sys._getframe(1))
        return _plain(plain, self, name, others)

    return run


for _kind, _base in ((OppositeInt, int), (OppositeFloat, float)):
    for _names, _make in (
        (_COMPUTING, _computing), (_OF_BITS, _computing), (_COMPARISONS, _comparison), ((*_TEXTS, "__hash__"), _lookup)
    ):  # fmt: skip
        for _name in _names:
            if hasattr(_base, _name):
                setattr(_kind, _name, _make(_base, _name))


@dataclass(slots=True)
class OppositeItems:
    """An iterator whose numbers have the opposite outcome in comparisons."""

    items: Iterator[Any]
    uses: Uses

    def __iter__(self) -> OppositeItems:
        return self

    def __next__(self) -> Any:
        return _opposite_item(next(self.items), self.uses)


def _opposite_item(item: Any, uses: Uses) -> Any:
    if not isinstance(item, int | float) or isinstance(item, bool):
        return item
    return made_at(sys._getframe(2), item, uses)


def made_at(frame: FrameType, number: float, uses: Uses) -> Any:
    """An opposite number, which a frame may use."""
    made = opposite(number, uses)
    if len(uses.made) < _LONGEST:
        uses.made.append((made, line_of(frame), frame.f_code))
    return made


def opposite_array(values: Any, uses: Uses) -> Any:
    """A view of an array of NumPy whose items, and the numbers computed from them, have the opposite outcome."""
    made = values.view(_opposite_arrays())
    made.uses = uses
    return made


@functools.cache
def _opposite_arrays() -> Any:
    numpy = sys.modules["numpy"]
    comparisons = {
        getattr(numpy, name) for name in ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
    }

    class OppositeArray(numpy.ndarray):  # type: ignore[name-defined, misc]
        """An array whose comparisons have the opposite outcome."""

        uses: Uses

        def __array_finalize__(self, made_of: Any) -> None:
            if made_of is not None:
                self.uses = getattr(made_of, "uses", None) or Uses()

        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            return _opposite_item(found.item(), self.uses) if isinstance(found, numpy.generic) else found

        def __setitem__(self, key: Any, value: Any) -> None:
            if isinstance(value, OppositeInt | OppositeFloat):
                value.used = True  # it is state of the next step
            super().__setitem__(key, value)

        def item(self, *key: Any) -> Any:
            return _opposite_item(super().item(*key), self.uses)

        def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
            plain = lambda x: x.view(numpy.ndarray) if isinstance(x, OppositeArray) else x  # noqa: E731
            out = options.get("out", ())
            if out:
                options["out"] = tuple(map(plain, out))
            found = getattr(function, method)(*map(plain, inputs), **options)
            if out:
                return out[0] if len(out) == 1 else out
            found = numpy.logical_not(found) if function in comparisons else found
            if isinstance(found, numpy.generic):
                return _opposite_item(found.item(), self.uses)
            return opposite_array(found, self.uses) if isinstance(found, numpy.ndarray) else found

    return OppositeArray
