"""Copies of Python values that can be compared later, and the values to which other values lead.

self.table[0] += 1; TABLE["n"] += 1          items of arrays and containers
self.slots.n += 1; count.n += 1              attributes, also of functions, and in slots
nonlocal n; n += 1                           variables of functions, and their defaults
next(self.numbers)                           the states of iterators, and the variables of generators
"""

from __future__ import annotations

import array
import functools
import sys
import types
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partc.installed import is_installed
from partc.torch_private import without_modes

DEPTH, ITEMS = 8, 1 << 16
_LARGEST_ARRAY = 1 << 24  # bytes
CONSTANTS = frozenset({bool, int, float, str, bytes, complex, torch.dtype, torch.device, type(None)})
_PLAIN = tuple(CONSTANTS)
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_WRAPPERS = (staticmethod, classmethod)


def is_users(item: Any) -> bool:
    """Whether code belongs to the user and not to an installed package."""
    home = item if isinstance(item, types.ModuleType) else sys.modules.get(getattr(item, "__module__", None) or "")
    file = getattr(home, "__file__", None)
    return bool(file) and not is_installed(Path(str(file)))


def is_code(value: Any) -> bool:
    """Whether a value is a module, a class or a function, or another callable of a library."""
    if isinstance(value, (functools.partial, *_METHODS)):
        return False
    return isinstance(value, types.ModuleType | type) or (callable(value) and not is_users(type(value)))


def comparable_copy(value: Any, kept: list[Any], depth: int, known: dict[int, Any]) -> Any:
    """A copy of the value that can be compared later. Python modules, whose globals may be many, are compared by
    identity.
    """
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, _PLAIN):
        return constant(value)
    if isinstance(value, Tensor):
        kept.append(value)
        return ("tensor", id(value))
    if isinstance(value, torch.Generator):
        with without_modes():
            return ("generator", tuple(value.get_state().tolist()))
    if (numbers := _numbers(value)) is not None:
        return numbers
    copy = lambda item: (  # noqa: E731
        constant(item) if type(item) in CONSTANTS else comparable_copy(item, kept, depth - 1, known)
    )
    items = _items(value) if depth else None
    if items is not None and len(items) <= ITEMS:
        kept.append(value)
        known[id(value)] = ("again", id(value))  # it may contain itself
        if isinstance(value, Mapping):
            known[id(value)] = ("mapping", tuple((repr(key)[:200], copy(item)) for key, item in items))
        else:
            known[id(value)] = ("items", tuple(map(copy, items)))
        return known[id(value)]
    if isinstance(value, set | frozenset) and len(value) <= ITEMS:
        return ("set", tuple(sorted(repr(item)[:200] for item in value)))
    kept.append(value)
    known[id(value)] = ("object", id(value))
    if depth and (inside := parts(value)):
        known[id(value)] = ("object", id(value), tuple((name, copy(item)) for name, item in inside.items()))
    return known[id(value)]


def parts(value: Any) -> dict[str, Any]:
    """The values that an object holds besides its items, by name. Those of modules, classes and libraries' functions
    are left out.
    """
    match value:
        case types.FunctionType():
            return _variables(value) if is_users(value) else {}
        case _ if isinstance(value, _METHODS):
            return {"self": value.__self__, "function": getattr(value, "__func__", None)}
        case _ if isinstance(value, _WRAPPERS):
            return {"function": value.__func__}
        case property():
            return {"get": value.fget, "set": value.fset}
        case functools.partial():
            return {"function": value.func, "args": value.args, "keywords": value.keywords, **vars(value)}
        case types.GeneratorType():
            frame = value.gi_frame
            return {} if frame is None else {**frame.f_locals, "place": frame.f_lasti}
        case ContextVar():
            return {"value": value.get(None)}
    if isinstance(value, nn.Module) or is_code(value):
        return {}
    if hasattr(value, "__next__") and type(value).__module__ in ("builtins", "itertools"):
        with suppress(Exception), warnings.catch_warnings():  # of a kind that cannot be copied
            warnings.simplefilter("ignore")
            return {"state": value.__reduce__()}
    own = {name: item for name, item in getattr(value, "__dict__", {}).items() if name[:2] != "__"}
    return own | dict(_slots(value))


def _variables(function: types.FunctionType) -> dict[str, Any]:
    """The attributes of a function, its defaults and the variables of enclosing functions."""
    defaults = function.__defaults__ or ()
    code = function.__code__
    named = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    return {
        **dict(zip(named, defaults, strict=False)),
        **(function.__kwdefaults__ or {}),
        **{name: content(cell) for name, cell in cells if name != "__class__"},
        **vars(function),
    }


def content(cell: Any) -> Any:
    """The value of a variable of an enclosing function; None before it has one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name):
                yield name, slot.__get__(value)


def _numbers(value: Any) -> Any:
    """An array or a number of NumPy, or an array of Python, in comparable form; None for other values."""
    if isinstance(value, bytearray | array.array):
        return (type(value).__name__, bytes(value))
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.generic):
        return constant(value)
    if isinstance(value, numpy.ndarray) and value.nbytes <= _LARGEST_ARRAY:
        return ("array", value.shape, str(value.dtype), value.tobytes())
    return None


def _items(value: Any) -> list[Any] | None:
    """The first ITEMS + 1 items of a list, tuple, deque or mapping; None for other values.

    Subclasses may define no length, as e3nn's irreducible representations do, or no items, as urllib3's pools of
    connections do.
    """
    if isinstance(value, Mapping):
        try:
            return [*islice(value.items(), ITEMS + 1)]
        except Exception:  # of a class that partc does not know
            return None
    kind: Any = next((kind for kind in (list, tuple, deque) if isinstance(value, kind)), None)
    return None if kind is None else [*islice(kind.__iter__(value), ITEMS + 1)]


def constant(value: Any) -> tuple[str, str]:
    """A constant in comparable form."""
    return (type(value).__name__, repr(value))
