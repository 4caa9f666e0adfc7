"""Numbers of rows that masks select, which are unknown integers while a model is traced.

    len(x[mask]) == 0      a test, whose outcome the trace chooses
    torch.zeros(count)     a size: all rows, of which some are selected
    total / count          a tensor: total / mask.sum()
    range(count)           an integer: refused, because a trace with another number differs

`selections` creates them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from partc.errors import PartcError, Source, untraced
from partc.frontend.permissions import UNKNOWN_NUMBERS, permitted
from partc.frontend.statements import only_written
from partc.installed import is_machinery, line_of, user_frame
from partc.ir.program import Graph
from partc.replaced import replaced

# Comparisons with an integer that only test whether a count is zero, and their results if it is not.
TESTS_OF_ZERO: Mapping[tuple[str, int], bool] = {
    ("eq", 0): False, ("ne", 0): True, ("gt", 0): True, ("ge", 1): True, ("lt", 1): False, ("le", 0): False,
}  # fmt: skip
_known = ContextVar[dict[Source, None] | None]("known", default=None)
_COMPARED = ("eq", "ne", "gt", "ge", "lt", "le")


class Tests(Protocol):
    """The interface for tests whether masks select anything."""

    def nonempty(self, tested: Tensor, first: int = -1, last: int = -1) -> bool:
        """Whether a mask selects anything, or whether one of its elements `first` to `last - 1` is set, in this
        trace.
        """

    def parts(self, counts: Tensor, first: int, last: int) -> list[int]:
        """The parts `first` to `last - 1`, except those that tests have found empty."""

    def compares_inside_torch(self) -> bool:
        """Whether a function of torch compares two numbers."""

    def passed(self) -> bool | None:
        """The outcome under which a guard that compares two numbers does not raise; None for other comparisons."""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A comparison of numbers with an unknown outcome: a function that receives it may only use it in a guard."""

    _selections: Tests

    def __bool__(self) -> bool:
        passed = self._selections.passed()
        if passed is None:
            raise unknown_number()
        return passed


class RowCount(int):
    """The number of rows that a mask selects, or a number computed from it.

    As an integer it is the number of all rows (`whole`), or another integer in the other traces.
    """

    whole: int
    _selections: Tests
    _tensor: Callable[[], Tensor]
    _mask: Tensor | None
    _tested: Tensor | None

    def __new__(
        cls,
        whole: int,
        shown: int,
        selections: Tests,
        tensor: Callable[[], Tensor],
        mask: Tensor | None = None,
        tested: Tensor | None = None,
    ) -> RowCount:
        """`mask` is the mask whose rows this number counts; `tested` is that mask, also if the number is a multiple."""
        made = super().__new__(cls, shown)
        made.whole, made._selections, made._tensor, made._mask, made._tested = whole, selections, tensor, mask, tested
        return made

    __class__ = property(lambda number: int)

    def __hash__(self) -> int:
        """Raise TypeError, as torch's symbolic sizes do: a cache would compare the number with those of later calls."""
        raise TypeError("unhashable type: a number of rows that a mask selects")

    def tensor(self) -> Tensor:
        """The number as a tensor."""
        return self._tensor()

    def _compared(self, name: str, other: Any) -> Any:
        passed = self._selections.passed()
        if passed is not None:
            return passed
        if isinstance(other, int) and not isinstance(other, RowCount) and self._tested is not None:
            answer = TESTS_OF_ZERO.get((name, other))
            if answer is not None:
                return answer is self._selections.nonempty(self._tested)
        same = isinstance(other, RowCount) and self._mask is not None and self._mask is other._mask
        if same or self._selections.compares_inside_torch():
            compare: Callable[[int, Any], bool] = getattr(operator, name)
            return compare(self.whole, other.whole if isinstance(other, RowCount) else other)
        return Unsettled(self._selections)

    def __bool__(self) -> bool:
        if self._tested is None:
            raise unknown_number()
        return self._selections.nonempty(self._tested)

    def _computed(self, operate: Callable[[Any, Any], Any], other: Any, swapped: bool) -> Any:
        """The result of a binary operation; this number is the right operand if `swapped`."""

        def run(mine: Any, its: Any) -> Any:
            return operate(its, mine) if swapped else operate(mine, its)

        def tensor() -> Tensor:
            made: Tensor = run(self.tensor(), other.tensor() if isinstance(other, RowCount) else other)
            return made

        if isinstance(other, float) and type(other) is not float:
            return NotImplemented  # a number that a tensor holds
        if isinstance(other, int) and operate not in (operator.truediv, operator.pow):
            whole = run(self.whole, other.whole if isinstance(other, RowCount) else other)
            return RowCount(whole, run(int(self), int(other)), self._selections, tensor)
        return tensor() if isinstance(other, int | float | Tensor) else NotImplemented

    def __neg__(self) -> RowCount:
        return RowCount(-self.whole, -int(self), self._selections, lambda: -self.tensor())

    def __float__(self) -> float:
        permitted(UNKNOWN_NUMBERS).may()  # asks for a trace with another `float`
        raise unknown_number()


class ValueNumber(RowCount):
    """An integer that a tensor holds, such as a drawn or the largest place, plus a known `offset`."""

    base: Tensor
    offset: int

    @classmethod
    def of(cls, base: Tensor, offset: int, shown: int, selections: Tests) -> ValueNumber:
        made = cls(shown, shown, selections, lambda: base + offset if offset else base)
        made.base, made.offset = base, offset
        return made

    def length_from(self, start: object) -> int | None:
        """The number of places from `start` to this number; None if it is not known."""
        known = isinstance(start, ValueNumber) and start.base is self.base
        return self.offset - start.offset if known and isinstance(start, ValueNumber) else None

    def _compared(self, name: str, other: Any) -> Any:
        passed = self._selections.passed()
        if passed is not None:
            return passed
        return getattr(operator, name)(self.tensor(), other.tensor() if isinstance(other, RowCount) else other)

    def __bool__(self) -> bool:
        return bool(self.tensor() != 0)

    def __neg__(self) -> ValueNumber:
        return ValueNumber.of(-self.tensor(), 0, -int(self), self._selections)

    def _computed(self, operate: Callable[[Any, Any], Any], other: Any, swapped: bool) -> Any:
        plain = isinstance(other, int) and not isinstance(other, RowCount)
        if operate is operator.sub and not swapped and (length := self.length_from(other)) is not None:
            return length
        if plain and (operate is operator.add or (operate is operator.sub and not swapped)):
            step = int(other) if operate is operator.add else -int(other)
            return ValueNumber.of(self.base, self.offset + step, int(self) + step, self._selections)
        made = super()._computed(operate, other, swapped)
        if isinstance(made, RowCount):  # with the integer of this number, which no division makes equal in all traces
            return ValueNumber.of(made.tensor(), 0, int(self), self._selections)
        return made


class PartSize(RowCount):
    """The number of rows in the parts `first` to `last - 1` of a tensor that is split by `counts`."""

    counts: Tensor
    first: int
    last: int

    @classmethod
    def of(cls, counts: Tensor, first: int, last: int, shown: int, selections: Tests) -> PartSize:
        made = cls(shown, shown, selections, lambda: counts[first:last].sum())
        made.counts, made.first, made.last = counts, first, last
        return made

    def _compared(self, name: str, other: Any) -> Any:
        if isinstance(other, int) and not isinstance(other, RowCount) and (name, int(other)) in TESTS_OF_ZERO:
            return TESTS_OF_ZERO[name, int(other)] is bool(self)
        if isinstance(other, PartSize) and other.counts is self.counts and other.first == self.first:
            first, last = sorted((self.last, other.last))
            more = first < last and self._has_rows(first, last)
            return getattr(operator, name)(*((0, more) if self.last < other.last else (more, 0)))
        if not permitted(UNKNOWN_NUMBERS).may():
            raise unknown_number()
        return getattr(operator, name)(self.tensor(), other.tensor() if isinstance(other, RowCount) else other)

    def __bool__(self) -> bool:
        return self._has_rows(self.first, self.last)

    def _has_rows(self, first: int, last: int) -> bool:
        """Test whether the parts `first` to `last - 1` have rows; tests have found some of several to be empty."""
        parts = self._selections.parts(self.counts, first, last) if last > first + 1 else [first]
        return bool(parts) and self._selections.nonempty(self.counts, parts[0], parts[-1] + 1)

    def _computed(self, operate: Callable[[Any, Any], Any], other: Any, swapped: bool) -> Any:
        """The result of a binary operation. The sum of the sizes of adjacent parts is the size of the joined part;
        empty parts may lie between them.
        """
        if operate is operator.add and isinstance(other, int):
            if not isinstance(other, RowCount) and other == 0:
                return self
            if isinstance(other, PartSize) and other.counts is self.counts:
                left, right = (self, other) if self.first < other.first else (other, self)
                if left.last <= right.first and not self._selections.parts(self.counts, left.last, right.first):
                    shown = int(left) + int(right)
                    return PartSize.of(self.counts, left.first, right.last, shown, self._selections)
        return super()._computed(operate, other, swapped)


def give_operators(kind: type, *, computed: str, refused: str, methods: str) -> None:
    """Give a class of unknown numbers its operators: arithmetic by `_computed`, and comparisons by `_compared`.

    Arithmetic is refused where its result would look like a known number.
    """
    for word in computed.split():
        for name, swapped in ((word, False), (f"r{word}", True)):
            setattr(kind, f"__{name}__", _arithmetic(getattr(operator, word), swapped))
    for word in _COMPARED:
        setattr(kind, f"__{word}__", _comparison(word))
    for name in (*(f"__{word}__" for word in refused.split()), *methods.split()):
        setattr(kind, name, _refused)


def _arithmetic(operate: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Any, Any], Any]:
    return lambda number, other: number._computed(operate, other, swapped)


def _comparison(word: str) -> Callable[[Any, Any], Any]:
    return lambda number, other: number._compared(word, other)


def _refused(*_: Any) -> Any:
    raise unknown_number()


def note_known(frame: FrameType | None) -> None:
    """Note that a frame takes an unknown number for a known one, unless its statement only writes it."""
    noted = _known.get()
    if noted is not None and frame is not None and not only_written(frame):
        noted[line_of(frame)] = None


def _texts_of(plain: Any) -> dict[str, Callable[..., str]]:
    """The methods of unknown numbers that make texts like those of a class. They note the line that runs, unless its
    statement only writes the text.
    """
    represent, form = plain.__repr__, plain.__format__

    def shown(number: Any, *given: str) -> str:
        frame = sys._getframe(1)
        if not is_machinery(frame.f_code.co_filename):
            note_known(frame)
        return str(form(number, *given) if given else represent(number))

    return dict.fromkeys(("__repr__", "__str__", "__format__"), shown)


def give_texts(kind: type, plain: type) -> None:
    """Give a class of unknown numbers the texts of a class of known ones."""
    for name, shown in _texts_of(plain).items():
        setattr(kind, name, shown)


@contextmanager
def noting_known_numbers() -> Iterator[dict[Source, None]]:
    """A context that yields the lines that take unknown numbers for known ones: as texts, or as plain numbers."""
    lines: dict[Source, None] = {}
    token = _known.set(lines)
    try:
        with replaced(torch.SymInt, **_texts_of(torch.SymInt)), replaced(torch.SymFloat, **_texts_of(torch.SymFloat)):
            yield lines
    finally:
        _known.reset(token)


give_texts(RowCount, int)
give_operators(
    RowCount,
    computed="add sub mul truediv floordiv pow",
    refused="mod rmod abs round divmod rdivmod lshift rshift and or xor ceil floor trunc invert",
    methods="bit_length bit_count to_bytes as_integer_ratio",
)


def without_counts(item: Any, arithmetic: bool) -> Any:
    """The arguments with numbers of rows replaced by sizes, or by tensors for arithmetic."""
    if isinstance(item, RowCount):
        return item.tensor() if arithmetic else item.whole
    if isinstance(item, dict):
        return {key: without_counts(one, arithmetic) for key, one in item.items()}
    if isinstance(item, tuple | list):
        made = [without_counts(one, arithmetic) for one in item]
        return torch.Size(made) if isinstance(item, torch.Size) else made if isinstance(item, list) else tuple(made)
    return item


def check_numbers(graph: Graph, other: Graph | None, number: Source) -> None:
    """Check that no operation depends on the integer that stands for a number of rows.

    `other` is a trace with another integer; None if it failed. `number` is the first line that reads a number of rows.
    Raises PartcError P0206.
    """
    if other is None or len(graph.ops) != len(other.ops):
        raise unknown_number(number)
    for op, its in zip(graph.ops, other.ops, strict=True):
        if op != its:
            raise unknown_number(op.source or number)


def unknown_number(source: Source | None = None) -> PartcError:
    """The error for code that needs a number of rows as an integer, at `source` or else the line that runs."""
    frame = user_frame(sys._getframe(1))
    if source is None and frame is not None:
        source = line_of(frame)
    return untraced(
        "forward computes a Python number from the number of rows that a mask selects, or from listed counts",
        help="compute it as a tensor, such as mask.sum(); counts may divide rows, as in x.split(counts.tolist())",
        source=source,
    )
