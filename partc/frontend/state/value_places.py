"""Python values that forward changes in each step, and other values in their places.

self.n += 1                           an attribute; likewise a global, a variable of a function, and a slot
self.seen["batches"] += 1             an item of a dict, a list, an array or an object below one of these
self.losses.append(0.0)               a length
next(self.numbers)                    an iterator
"""

from __future__ import annotations

import array
import copy
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import count, islice
from typing import Any

from torch import Tensor, nn

from partc.frontend.state.comparable import CONSTANTS, DEPTH, comparable_copy, constant, parts
from partc.frontend.state.opposite_numbers import (
    OppositeFloat,
    OppositeInt,
    OppositeItems,
    Uses,
    opposite,
    opposite_array,
)

LATE = 100_003  # steps
_MOST = 1 << 16  # items of a container
_PYTHONS_ARRAYS = (bytearray, array.array)
_SETS = (set, frozenset)
_LISTS = (list, deque)
MUTABLE = (dict, set, *_LISTS)

Key = tuple[Any, ...]  # the number of a place, and the names and indices below it
Put = Callable[[Any], object]  # gives a place another value


@dataclass(frozen=True, slots=True)
class ValuePlace:
    """A value and its place; a place without `put` is fixed. Nothing is known about later values."""

    value: Any
    put: Put | None

    @property
    def state(self) -> Any:
        """The value in comparable form."""
        return comparable_copy(self.value, [], DEPTH, {})

    @property
    def exact(self) -> bool:
        """Whether a trace with the opposite value shows every branch on it, or notes the lines of the others."""
        return False

    def oppose(self, before: ValuePlace, uses: Uses) -> bool:
        """Put the value from before the last step with the opposite outcome of comparisons; False if that is not
        possible.
        """
        return False

    def advance(self, before: ValuePlace, steps: int) -> bool:
        """Put the value after so many further steps like the one since `before`; False if it is not known."""
        return False

    def reach(self, before: ValuePlace, number: float, ahead: bool) -> bool:
        """Put this number, or the one from which the next step would come to it; False if that is not possible."""
        return False

    def restore(self) -> None:
        """Put the value again."""
        if self.put is not None:
            self.put(self.value)

    def _replace(self, value: Any) -> bool:
        if self.put is not None:
            self.put(value)
        return self.put is not None


class Number(ValuePlace):
    """A number, also of NumPy."""

    @property
    def state(self) -> Any:
        return constant(self.value)

    @property
    def exact(self) -> bool:
        return type(self.value) in (int, float)

    def oppose(self, before: ValuePlace, uses: Uses) -> bool:
        number = before.value.item() if hasattr(before.value, "item") else before.value
        return isinstance(before, Number) and self._replace(opposite(number, uses))

    def advance(self, before: ValuePlace, steps: int) -> bool:
        return isinstance(before, Number) and self._set(self.value + (self.value - before.value) * steps)

    def reach(self, before: ValuePlace, number: float, ahead: bool) -> bool:
        return isinstance(before, Number) and self._set(number - (self.value - before.value) * ahead)

    def _set(self, number: Any) -> bool:
        try:
            return self._replace(type(self.value)(number))
        except (ArithmeticError, ValueError):  # not a number of this type
            return False


@dataclass(frozen=True, slots=True)
class Items(ValuePlace):
    """An iterator of Python."""

    held: Any  # a copy; None for a generator
    state: Any

    def oppose(self, before: ValuePlace, uses: Uses) -> bool:
        copied = copy.copy(before.held) if isinstance(before, Items) and before.held is not None else self.value
        return self._replace(OppositeItems(copied, uses))

    def advance(self, before: ValuePlace, steps: int) -> bool:
        later = copy.copy(self.held)
        return later is not None and self._replace(later) and sum(1 for _ in islice(later, steps)) > 0


@dataclass(frozen=True, slots=True)
class Length(ValuePlace):
    """A container or a text that may grow or shrink."""

    held: Any  # a copy

    @property
    def state(self) -> Any:
        if isinstance(self.value, str | bytes):
            return self.value
        return sorted(map(repr, self.held)) if isinstance(self.value, (dict, *_SETS)) else len(self.held)

    @property
    def exact(self) -> bool:
        return isinstance(self.value, MUTABLE)

    def oppose(self, before: ValuePlace, uses: Uses) -> bool:
        """Note the container, whose length is opposite: see `Uses.length`."""
        if isinstance(before, Length) and self.exact:
            uses.lengths.add(id(self.value))
            _fill(self.value, before.held)
        return self.exact

    def advance(self, before: ValuePlace, steps: int) -> bool:
        more = (len(self.held) - len(before.held)) * steps if isinstance(before, Length) else 0
        length = max(0, len(self.held) + more)
        match self.value:
            case _ if not more:
                return False
            case dict():
                further = dict.fromkeys(_further(self.held, more), _last(self.held.values()))
                _fill(self.value, dict(islice(self.held.items(), length)) | further)
            case set():
                _fill(self.value, {*islice(self.held, length), *_further(self.held, more)})
            case frozenset():
                return self._replace(frozenset({*islice(self.held, length), *_further(self.held, more)}))
            case tuple():
                return self._replace((*self.held[:length], *[_last(self.held)] * more))
            case str() | bytes():
                return self._replace(self.held[:length] + self.held[-1:] * more)
            case _:
                _fill(self.value, [*islice(self.held, length), *[_last(self.held)] * more])
        return True

    def restore(self) -> None:
        if self.exact:
            _fill(self.value, self.held)
        ValuePlace.restore(self)


@dataclass(frozen=True, slots=True)
class Array(ValuePlace):
    """An array of numbers, also of bytes."""

    held: Any  # a copy

    @property
    def state(self) -> Any:
        return comparable_copy(self.held, [], DEPTH, {})

    @property
    def exact(self) -> bool:
        return True

    def oppose(self, before: ValuePlace, uses: Uses) -> bool:
        if not isinstance(before, Array):
            return False
        if isinstance(self.value, _PYTHONS_ARRAYS):  # a list behaves alike
            made = [opposite(each, uses) for each in before.held]
            uses.lengths.add(id(made))
            return self._replace(made)
        return self._replace(opposite_array(before.held.copy(), uses))

    def advance(self, before: ValuePlace, steps: int) -> bool:
        if not isinstance(before, Array):
            return False
        if isinstance(self.value, _PYTHONS_ARRAYS):
            more = (len(self.held) - len(before.held)) * steps
            pairs = zip(before.held, self.held, strict=False)
            later = [new + (new - old) * steps for old, new in pairs] if not more else [*self.held]
            return self._replace([*later[: max(0, len(later) + more)], *later[-1:] * more])
        if before.held.shape != self.held.shape:
            return False
        with _numpy().errstate(all="ignore"):
            return self._write(self.held + (self.held - before.held) * steps)

    def reach(self, before: ValuePlace, number: float, ahead: bool) -> bool:
        if not isinstance(before, Array) or isinstance(self.value, _PYTHONS_ARRAYS):
            return False
        change = self.held - before.held
        return self._write(_numpy().where(change != 0, number - change * ahead, self.held))

    def _write(self, values: Any) -> bool:
        _numpy().copyto(self.value, values, casting="unsafe")
        return True

    def restore(self) -> None:
        if isinstance(self.value, _PYTHONS_ARRAYS):
            self.value[:] = self.held
        elif self.value.flags.writeable:
            self.value[...] = self.held
        ValuePlace.restore(self)


ValuePlaces = Mapping[Key, ValuePlace]


def value_places(places: Iterable[tuple[Any, Put | None]]) -> dict[Key, ValuePlace]:
    """The places of numbers, texts, containers and iterators, by key: at places given as their values and the functions
    that put others there, and below them.
    """
    seen: dict[int, Any] = {}
    return {key: leaf for index, (value, put) in enumerate(places) for key, leaf in _leaves(value, put, (index,), seen)}


def part_put(value: Any, name: str) -> Put | None:
    """The function that gives a part of an object another value; None if the part is fixed."""
    match value:
        case types.FunctionType() if name in value.__code__.co_freevars:
            cell = (value.__closure__ or ())[value.__code__.co_freevars.index(name)]
            return partial(setattr, cell, "cell_contents")
        case types.FunctionType():
            return partial(setattr, value, name) if name in vars(value) else None
        case ContextVar():
            return value.set
        case _ if name in getattr(value, "__dict__", {}):
            return partial(vars(value).__setitem__, name)
        case _ if isinstance(getattr(type(value), name, None), types.MemberDescriptorType):
            return partial(object.__setattr__, value, name)
    return None


def _leaves(value: Any, put: Put | None, key: Key, seen: dict[int, Any]) -> Iterator[tuple[Key, ValuePlace]]:
    numpy = _numpy()
    if type(value) in (int, float, OppositeInt, OppositeFloat) or (numpy and isinstance(value, numpy.number)):
        yield key, Number(value, put)
        return
    if isinstance(value, str | bytes):
        yield key, Length(value, put, value)
        return
    if isinstance(value, (*CONSTANTS, Enum)):
        if not isinstance(value, bool | int | float):  # both booleans are tried; other numbers are unknown
            yield key, ValuePlace(value, put)
        return
    if id(value) in seen or len(key) > DEPTH or isinstance(value, Tensor):
        return
    seen[id(value)] = value
    if isinstance(value, _PYTHONS_ARRAYS) or (numpy and isinstance(value, numpy.ndarray)):
        numbers = isinstance(value, _PYTHONS_ARRAYS) or value.dtype.kind in "iuf"
        yield key, Array(value, put, copy.copy(value)) if numbers else ValuePlace(copy.copy(value), put)
    elif isinstance(value, (tuple, dict, *_LISTS, *_SETS)):
        yield key, Length(value, put, copy.copy(value))
        if len(value) <= _MOST:
            yield from _below(value, put, key, seen)
    elif inside := vars(value) if isinstance(value, nn.Module) else parts(value):
        if hasattr(value, "__next__") and type(value).__module__ in ("builtins", "itertools"):
            copied = None if isinstance(value, types.GeneratorType) else copy.copy(value)
            yield key, Items(value, put, copied, comparable_copy(value, [], DEPTH, {}))
        for name, item in [*inside.items()]:
            yield from _leaves(item, part_put(value, name), (*key, name), seen)


def _below(value: Any, put: Put | None, key: Key, seen: dict[int, Any]) -> Iterator[tuple[Key, ValuePlace]]:
    """The places in the items of a container."""
    if isinstance(value, _SETS):
        return
    items = [*value] if isinstance(value, tuple) else value
    for below, item in [*value.items()] if isinstance(value, dict) else [*enumerate(value)]:
        inner: Put | None = partial(items.__setitem__, below)
        if isinstance(value, tuple):
            inner = None if put is None else partial(_put_in_tuple, items, below, type(value), put)
        yield from _leaves(item, inner, (*key, below), seen)


def _put_in_tuple(items: list[Any], place: int, kind: type, put: Put, item: Any) -> None:
    items[place] = item
    put(getattr(kind, "_make", kind)(items))


def _further(held: Any, more: int) -> list[Any]:
    """Keys that a dict or a set lacks."""
    return [*islice((key for key in count(len(held)) if key not in held), max(0, more))]


def _last(items: Iterable[Any]) -> Any:
    return deque(items, maxlen=1).pop() if items else None


def _fill(container: Any, items: Any) -> None:
    container.clear()
    container.update(items) if isinstance(container, dict | set) else container.extend(items)


def _numpy() -> Any:
    return sys.modules.get("numpy")
