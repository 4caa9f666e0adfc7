"""Attributes of modules that have their old values again after an export.

`torch.export` does this with copies: two attributes that are one list become two lists, a list that contains itself
ends in a RecursionError, and lists that are shared at many depths take exponential time.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

_LISTS, _MAPPINGS = (list, deque), (dict, OrderedDict, defaultdict)
_CONTAINERS = (*_LISTS, *_MAPPINGS, tuple)
MEMBERS = frozenset(vars(nn.Module()))  # the attributes of every module: members, hooks and `training`


@dataclass(frozen=True, slots=True)
class Contents:
    """A snapshot of the contents of lists and dicts."""

    lists: tuple[tuple[Any, tuple[Any, ...]], ...]
    mappings: tuple[tuple[Any, dict[Any, Any]], ...]

    @classmethod
    def reached(cls, values: Iterable[Any]) -> Contents:
        """The contents of every list and dict that these values are or hold."""
        seen: dict[int, Any] = {}
        waiting = [value for value in values if isinstance(value, _CONTAINERS)]
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen[id(value)] = value
            held = value.values() if isinstance(value, dict) else value
            waiting.extend(each for each in held if isinstance(each, _CONTAINERS))
        lists = tuple((each, tuple(each)) for each in seen.values() if type(each) in _LISTS)
        mappings = tuple((each, {**each}) for each in seen.values() if type(each) in _MAPPINGS)
        return cls(lists, mappings)

    def remove(self, found: Callable[[Any], bool]) -> None:
        """Remove the values of which `found` is true from each list and dict."""
        for mapping, held in self.mappings:
            for key in (key for key, value in held.items() if found(value)):
                del mapping[key]
        for values, items in self.lists:
            if any(map(found, items)):
                values.clear()
                values.extend(itertools.filterfalse(found, items))

    def restore(self, renewed: Callable[[Any], Any] = lambda value: value) -> None:
        """Give each list and dict its contents again, each value as `renewed` returns it."""
        for values, items in self.lists:
            values.clear()
            values.extend(map(renewed, items))
        for mapping, held in self.mappings:
            mapping.clear()
            mapping.update((key, renewed(value)) for key, value in held.items())


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """A context after which every attribute is the same object again, and lists and dicts among them have their old
    contents. Attributes that are new stay.
    """
    before = [(vars(module), own_attributes(module)) for module in model.modules()]
    contents = Contents.reached(value for _, attributes in before for value in attributes.values())
    try:
        yield
    finally:
        for store, attributes in before:
            store.update(attributes)
        contents.restore()


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that not every module has."""
    return {name: value for name, value in vars(module).items() if name not in MEMBERS}
