"""The caches of a model's functions: `functools.lru_cache` on methods, on functions next to them, and in attributes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from typing import Any

from torch import nn

_PLAIN = frozenset({bool, int, float, str, type(None), dict, list, tuple, set})  # values that hold no functions' caches


def caches(model: nn.Module) -> Iterator[_lru_cache_wrapper[Any]]:
    """Every cache that a module of the model, its class, or the Python module of its class holds."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if not _of_torch(kind)}
    homes = {id(home): home for kind in kinds if (home := sys.modules.get(kind.__module__)) is not None}
    for owner in (*model.modules(), *kinds, *homes.values()):
        for value in tuple(vars(owner).values()):
            if type(value) not in _PLAIN:
                yield from _caches_in(value)


def _caches_in(value: Any) -> Iterator[_lru_cache_wrapper[Any]]:
    """The caches in a value: the value itself, or functions that a decorated function calls."""
    value = getattr(value, "__func__", value)
    cells = getattr(value, "__closure__", None) or ()
    held = (getattr(cell, "cell_contents", None) for cell in cells)  # a cell may be empty
    yield from (each for each in (value, *held) if isinstance(each, _lru_cache_wrapper))


def _of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "builtins")
