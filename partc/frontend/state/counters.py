"""Numbers that forward changes in each step, and lists that it makes longer.

self.n += 1                           an attribute; likewise a global, and an attribute of a class
self.seen["batches"] += 1             an item of a dict, a list, a deque or an object below one of these
self.losses.append(0.0)               a length
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

_DEEPEST = 8
_CODE = type | ModuleType | FunctionType | MethodType
_LATER = 100_003  # steps

Key = tuple[Any, ...]  # the number of a place, and the names and indices below it


@dataclass(frozen=True, slots=True)
class Number:
    """A number, and the dict, list or class that holds it."""

    holder: Any
    name: Any
    value: float

    def put(self, value: Any) -> None:
        if isinstance(self.holder, type):
            setattr(self.holder, self.name, value)
        else:
            self.holder[self.name] = value


@dataclass(frozen=True, slots=True)
class Length:
    """The length of a list or deque."""

    items: Any
    value: int

    def put(self, value: Any) -> None:
        """Repeat the last item up to this length, or remove items at the end."""
        self.items.extend([*self.items][-1:] * (value - len(self.items)))
        while len(self.items) > value:
            self.items.pop()


Counters = Mapping[Key, Number | Length]


def counters(places: Iterable[tuple[Any, str]]) -> dict[Key, Number | Length]:
    """The numbers and lengths at the names of dicts or classes, and below them, by key."""
    found: dict[Key, Number | Length] = {}
    for index, (holder, name) in enumerate(places):
        held = vars(holder) if isinstance(holder, type) else holder
        if name in held:
            found.update(_below(holder, name, held[name], (index,), set()))
    return found


def later(before: float, after: float) -> Any:
    """The number after many steps, each of which makes the same change."""
    return before + (after - before) * _LATER


def _below(holder: Any, name: Any, value: Any, key: Key, seen: set[int]) -> Iterator[tuple[Key, Number | Length]]:
    key = (*key, name)
    if isinstance(value, int | float):
        if not isinstance(value, bool):
            yield key, Number(holder, name, value)
        return
    if id(value) in seen or len(key) > _DEEPEST or isinstance(value, Tensor | _CODE):
        return
    seen.add(id(value))
    if isinstance(value, list | deque):
        yield key, Length(value, len(value))
        items: Iterable[tuple[Any, Any]] = enumerate(value)
    else:
        value = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        items = value.items()
    for below, item in items:
        yield from _below(value, below, item, key, seen)
