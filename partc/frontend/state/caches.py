"""The caches of a model's functions: `functools.lru_cache` on methods, on functions next to them, and in attributes."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterable, Iterator
from functools import _lru_cache_wrapper
from typing import Any

from torch import nn

_PLAIN = frozenset({bool, int, float, str, type(None), dict, list, tuple, set})  # values that hold no functions' caches


def caches(modules: Iterable[nn.Module], homes: Iterable[types.ModuleType]) -> list[_lru_cache_wrapper[Any]]:
    """Every cache that a module, its class, the Python module of its class, or one of `homes` holds."""
    modules = tuple(modules)
    kinds = {kind for module in modules for kind in type(module).__mro__ if not _of_torch(kind)}
    owners: list[Any] = [*modules, *kinds, *(sys.modules.get(kind.__module__) for kind in kinds), *homes]
    found: dict[int, _lru_cache_wrapper[Any]] = {}
    for owner in {id(owner): owner for owner in owners if owner is not None}.values():
        for value in tuple(vars(owner).values()):
            if type(value) not in _PLAIN:
                found.update((id(cache), cache) for cache in _caches_in(value))
    return list(found.values())


def cached_values(cache: _lru_cache_wrapper[Any]) -> list[Any]:
    """The arguments and results in a cache, among the other objects to which it refers."""
    return gc.get_referents(cache) if cache.cache_info().currsize else []


def _caches_in(value: Any) -> Iterator[_lru_cache_wrapper[Any]]:
    """The caches in a value: the value itself, or functions that a decorated function calls."""
    if isinstance(value, types.MethodType | staticmethod | classmethod):
        value = value.__func__
    cells = (value.__closure__ or ()) if isinstance(value, types.FunctionType) else ()
    held = (getattr(cell, "cell_contents", None) for cell in cells)  # a cell may be empty
    yield from (each for each in (value, *held) if isinstance(each, _lru_cache_wrapper))


def _of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "builtins")
