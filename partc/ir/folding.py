"""Repetitions in a program's actions as loops: statements that repeat over calls, actions over microbatches.

    run F blocks.0                            for $1 in blocks.0 to blocks.2:
    run F blocks.1              <->             run F $1
    run F blocks.2

    0F3 0B0 0F4 0B1 0F5 0B2     <->           3 * (0F3 0B0)
    0F0 0F1 0F2 0B0 0B1 0B2
    0F3 0F4 0F5 0B3 0B4 0B5     <->           3 * (3 * (0F0) 3 * (0B0)) by 3
    0F6 0F7 0F8 0B6 0B7 0B8

Folding only changes the notation: unfolding gives back every statement and every action.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeVar

from partc.ir.program import Action, ActionStatement

T = TypeVar("T")
_FEWEST = 3  # repetitions that make a loop
_LONGEST = 64  # statements or actions in a loop
_SHORT = 24  # the most actions of a row that is written out
_SHAPE = attrgetter(*(name for name in ActionStatement.__slots__ if name not in ("of", "ahead")))
_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]*)", re.DOTALL)

Item = str | int  # the name of a call or bucket, or the first or second gather of later actions


@dataclass(frozen=True, slots=True)
class Loop:
    """Statements that repeat; `slots` are the variables' values, `uses` the variable of each statement."""

    slots: tuple[tuple[Item, ...], ...]
    statements: tuple[ActionStatement, ...]
    uses: tuple[int | None, ...]


def folded(statements: Sequence[ActionStatement]) -> Iterator[ActionStatement | Loop]:
    """The statements, with repetitions over calls folded into loops."""
    at = 0
    while at < len(statements):
        period, times = _repetition(statements, at, _differ_by_item)
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
    """The statements of all iterations."""
    for row in zip(*loop.slots, strict=True):
        for statement, slot in zip(loop.statements, loop.uses, strict=True):
            yield statement if slot is None else _with_item(statement, row[slot])


def _with_item(statement: ActionStatement, item: Item) -> ActionStatement:
    return replace(statement, of="", ahead=item) if isinstance(item, int) else replace(statement, of=item, ahead=0)


def _item(statement: ActionStatement) -> Item:
    return statement.ahead or statement.of


def _differ_by_item(a: ActionStatement, b: ActionStatement) -> bool:
    return _SHAPE(a) == _SHAPE(b) and bool(_item(a)) == bool(_item(b))


def _repetition(items: Sequence[T], at: int, alike: Callable[[T, T], bool]) -> tuple[int, int]:
    """The length and number of the repetitions that begin at an index: the longest cover, then the shortest body."""
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


def item_range(first: Item, last: Item) -> Iterator[Item]:
    """The items from the first to the last."""
    if first == last or isinstance(first, int) or isinstance(last, int):
        yield first
        return
    a, b = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(last)
    if a is None or b is None or a[1] != b[1]:
        raise ValueError(f"{first!r} to {last!r} is not a range of names")
    low, high = int(a[2]), int(b[2])
    yield from (f"{a[1]}{number}" for number in (range(low, high + 1) if low < high else range(low, high - 1, -1)))


def _step(a: Item, b: Item) -> int:
    """1 or -1 if the numbers in two names differ by it, else 0."""
    if isinstance(a, int) or isinstance(b, int):
        return 0
    left, right = _NUMBERED.fullmatch(a), _NUMBERED.fullmatch(b)
    if left is None or right is None or left[1] != right[1]:
        return 0
    step = int(right[2]) - int(left[2])
    return step if abs(step) == 1 else 0


@dataclass(frozen=True, slots=True)
class Repeat:
    """Actions and inner loops, repeated; each iteration's microbatches are `by` higher."""

    times: int
    by: int
    items: tuple[Action | Repeat, ...]


def folded_row(row: Sequence[Action]) -> Sequence[Action | Repeat]:
    """A long schedule row, with its steady state as loops; loops of loops where stages take turns."""
    if len(row) <= _SHORT:
        return row
    items: Sequence[Action | Repeat] = row
    while len(inner := tuple(_folded_once(items))) < len(items):
        items = inner
    return items


def _folded_once(items: Sequence[Action | Repeat]) -> Iterator[Action | Repeat]:
    at = 0
    while at < len(items):
        period, times, by = _steady(items, at)
        if times < _FEWEST:
            yield items[at]
            at += 1
            continue
        yield Repeat(times, by, tuple(items[at : at + period]))
        at += period * times


def unfolded_row(item: Action | Repeat, later: int = 0) -> Iterator[Action]:
    """The actions of all iterations, with microbatches `later` higher than written."""
    if isinstance(item, Action):
        yield item if item.microbatch is None else replace(item, microbatch=item.microbatch + later)
        return
    for turn in range(item.times):
        for inner in item.items:
            yield from unfolded_row(inner, later + turn * item.by)


def _steady(items: Sequence[Action | Repeat], at: int) -> tuple[int, int, int]:
    best = (1, 1, 0)
    for period in range(1, min(_LONGEST, (len(items) - at) // 2) + 1):
        a, b = _first_microbatch(items[at]), _first_microbatch(items[at + period])
        by = 0 if a is None or b is None else b - a
        end = at + period
        while end < len(items) and _microbatches_later(items[end - period], items[end], by):
            end += 1
        times = (end - at) // period
        if times >= _FEWEST and period * times > best[0] * best[1]:
            best = (period, times, by)
    return best


def _first_microbatch(item: Action | Repeat) -> int | None:
    return item.microbatch if isinstance(item, Action) else _first_microbatch(item.items[0])


def _microbatches_later(a: Action | Repeat, b: Action | Repeat, by: int) -> bool:
    if isinstance(a, Repeat) and isinstance(b, Repeat):
        same = (a.times, a.by, len(a.items)) == (b.times, b.by, len(b.items))
        return same and all(_microbatches_later(x, y, by) for x, y in zip(a.items, b.items, strict=True))
    if isinstance(a, Repeat) or isinstance(b, Repeat):
        return False
    if (a.stage, a.kind, a.ahead) != (b.stage, b.kind, b.ahead) or (a.microbatch is None) != (b.microbatch is None):
        return False
    return a.microbatch is None or b.microbatch is None or b.microbatch - a.microbatch == by
