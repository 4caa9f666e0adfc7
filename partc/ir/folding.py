"""Repetitions in a program's actions, as loops: statements of equal calls, and microbatches that count up.

    run F blocks.0                            for $1 in blocks.0 to blocks.2:
    run F blocks.1              <->             run F $1
    run F blocks.2

    0F3 0B0 0F4 0B1 0F5 0B2     <->           3 * (0F3 0B0)

Folding only changes how a list is written: unfolding gives back every statement and every action.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from partc.ir.program import Action, ActionStatement

T = TypeVar("T")
_FEWEST = 3  # repetitions that make a loop
_LONGEST = 64  # statements or actions in one
_SHORT = 24  # a row of no more actions is written out
_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]*)", re.DOTALL)

Item = str | int  # a call's name, or the first or second call that the actions after this one gather for


@dataclass(frozen=True, slots=True)
class Loop:
    """Statements over the rows of `slots`: the statement at a position uses the slot of the number that `uses` has."""

    slots: tuple[tuple[Item, ...], ...]
    statements: tuple[ActionStatement, ...]
    uses: tuple[int | None, ...]


def folded(statements: Sequence[ActionStatement]) -> Iterator[ActionStatement | Loop]:
    """Statements, with those that repeat for one call after the other as loops."""
    at = 0
    while at < len(statements):
        period, times = _repetition(statements, at, _alike)
        if times < _FEWEST:
            yield statements[at]
            at += 1
            continue
        slots: dict[tuple[Item, ...], int] = {}
        uses: list[int | None] = []
        for place in range(period):
            items = tuple(_item(statements[at + place + period * turn]) for turn in range(times))
            named = items != ("",) * times
            uses.append(slots.setdefault(items, len(slots)) if named else None)
        yield Loop(tuple(slots), tuple(statements[at : at + period]), tuple(uses))
        at += period * times


def unfolded(loop: Loop) -> Iterator[ActionStatement]:
    """The statements of every turn."""
    for row in zip(*loop.slots, strict=True):
        for statement, slot in zip(loop.statements, loop.uses, strict=True):
            yield statement if slot is None else _using(statement, row[slot])


def _using(statement: ActionStatement, item: Item) -> ActionStatement:
    return replace(statement, of="", ahead=item) if isinstance(item, int) else replace(statement, of=item, ahead=0)


def _item(statement: ActionStatement) -> Item:
    return statement.ahead or statement.of


def _alike(a: ActionStatement, b: ActionStatement) -> bool:
    same = (a.verb, a.subject, a.peer, a.last) == (b.verb, b.subject, b.peer, b.last)
    return same and bool(_item(a)) == bool(_item(b))


def _repetition(items: Sequence[T], at: int, alike: Callable[[T, T], bool]) -> tuple[int, int]:
    """The length of what repeats from a place on, and how often; the one that covers most, then the shortest."""
    best = (1, 1)
    for period in range(1, min(_LONGEST, (len(items) - at) // 2) + 1):
        end = at + period
        while end < len(items) and alike(items[end - period], items[end]):
            end += 1
        times = (end - at) // period
        if times >= _FEWEST and period * times > best[0] * best[1]:
            best = (period, times)
    return best


def ranges(items: Sequence[Item]) -> Iterator[tuple[Item, Item]]:
    """First and last of each run of names that count by one."""
    start = 0
    while start < len(items):
        end, step = start, 0
        while end + 1 < len(items) and (found := _step(items[end], items[end + 1])) and step in (0, found):
            end, step = end + 1, found
        yield items[start], items[end]
        start = end + 1


def ranged(first: Item, last: Item) -> Iterator[Item]:
    """The items from the first to the last."""
    if first == last or isinstance(first, int) or isinstance(last, int):
        yield first
        return
    a, b = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(last)
    if a is None or b is None or a[1] != b[1]:
        raise ValueError(f"{first!r} to {last!r} is no range of names")
    low, high = int(a[2]), int(b[2])
    yield from (f"{a[1]}{number}" for number in (range(low, high + 1) if low < high else range(low, high - 1, -1)))


def _step(a: Item, b: Item) -> int:
    """1 or -1 where two names differ by that; else 0."""
    if isinstance(a, int) or isinstance(b, int):
        return 0
    left, right = _NUMBERED.fullmatch(a), _NUMBERED.fullmatch(b)
    if left is None or right is None or left[1] != right[1]:
        return 0
    step = int(right[2]) - int(left[2])
    return step if abs(step) == 1 else 0


@dataclass(frozen=True, slots=True)
class Repeat:
    """Actions done several times, each time with microbatches `by` higher."""

    times: int
    by: int
    actions: tuple[Action, ...]


def folded_row(row: Sequence[Action]) -> Iterator[Action | Repeat]:
    """A long schedule row, with its steady state as repetitions."""
    at = 0
    while at < len(row):
        period, times, by = _steady(row, at) if len(row) > _SHORT else (1, 1, 0)
        if times < _FEWEST:
            yield row[at]
            at += 1
            continue
        yield Repeat(times, by, tuple(row[at : at + period]))
        at += period * times


def unfolded_row(repeat: Repeat) -> Iterator[Action]:
    for turn in range(repeat.times):
        for action in repeat.actions:
            later = None if action.microbatch is None else action.microbatch + turn * repeat.by
            yield replace(action, microbatch=later)


def _steady(row: Sequence[Action], at: int) -> tuple[int, int, int]:
    best = (1, 1, 0)
    for period in range(1, min(_LONGEST, (len(row) - at) // 2) + 1):
        a, b = row[at].microbatch, row[at + period].microbatch
        by = 0 if a is None or b is None else b - a
        end = at + period
        while end < len(row) and _later(row[end - period], row[end], by):
            end += 1
        times = (end - at) // period
        if times >= _FEWEST and period * times > best[0] * best[1]:
            best = (period, times, by)
    return best


def _later(a: Action, b: Action, by: int) -> bool:
    if (a.stage, a.kind, a.ahead) != (b.stage, b.kind, b.ahead) or (a.microbatch is None) != (b.microbatch is None):
        return False
    return a.microbatch is None or b.microbatch is None or b.microbatch - a.microbatch == by
