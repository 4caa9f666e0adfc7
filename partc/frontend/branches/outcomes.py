"""The outcomes of the branches and of the tests of masks in one trace.

A trace follows one outcome of each branch. Traces with different outcomes are joined to a program that chooses at run
time.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from partc.errors import Source


@dataclass(frozen=True, slots=True)
class Parity:
    """The numbers that have an odd, or an even, number of ones among these bits."""

    bits: int
    odd: bool

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and (number & self.bits).bit_count() % 2 == self.odd


@dataclass(frozen=True, slots=True)
class AllBut:
    """All numbers but one."""

    number: int

    def __contains__(self, number: object) -> bool:
        return number != self.number


_NONE: Container[int] = frozenset[int]()
_ALL = Parity(0, odd=False)
_EVEN, _ODD = Parity(1, odd=False), Parity(1, odd=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The outcomes of a trace's branches on random numbers and of its tests of masks."""

    below: Container[int] = _NONE  # the branches whose random number is below the limit
    selecting: Container[int] = _ALL  # the tests whose mask selects something
    rows: Literal["own", "one", "half"] = "own"  # the integers that stand for the numbers of selected rows
    kept: bool = False  # whether a package may have operations of this trace; all others are only compared with it
    tried: frozenset[tuple[str, str]] = frozenset()  # state whose changes proved to have no effect in another trace


ABOVE = Outcomes(kept=True)
BELOW = Outcomes(below=_ALL, kept=True)
FIRST_BELOW, SECOND_BELOW = Outcomes(below=_EVEN), Outcomes(below=_ODD)  # and every second branch behind it
EMPTY = Outcomes(selecting=_NONE)
ONE_ROW, HALF_THE_ROWS = Outcomes(rows="one"), Outcomes(rows="half")

# For any two of the first 2**n tests, one of the first 2n traces has a mask that selects nothing in the first test and
# something in the second. For any two branches, in one of FIRST_BELOW, SECOND_BELOW and the first 2n - 2 traces only
# the first branch is below its limit.
_PARITIES = tuple(Parity(bits, odd) for bits in (2, -1, 4, 8) for odd in (False, True))
PARTLY_EMPTY = tuple(Outcomes(selecting=numbers) for numbers in (_EVEN, _ODD, *_PARITIES))
PARTLY_BELOW = tuple(Outcomes(below=numbers) for numbers in _PARITIES)


def on_path(below: Sequence[bool]) -> Outcomes:
    """The outcomes in which the first random numbers are below their limits or not, and all further ones are not."""
    return Outcomes(below=frozenset(number for number, each in enumerate(below) if each), kept=True)


def one_unlike(all: Outcomes, number: int) -> Outcomes:
    """The outcomes ABOVE or BELOW, except that one branch has the other outcome."""
    return Outcomes(below=AllBut(number) if number in all.below else frozenset({number}), kept=True)


def told_apart(count: int, sources: Iterable[Source | None]) -> int:
    """The number of bits that distinguish tests. Of many tests on one line, as in a loop over layers, only neighbours
    are distinguished.
    """
    return (min(count, max(8, len(set(sources)))) - 1).bit_length()
