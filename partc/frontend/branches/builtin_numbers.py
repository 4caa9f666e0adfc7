"""Python's `len`, `max`, `min` and `type` in a model's modules, for numbers that are unknown in a trace.

    loss / max(1, len(x[mask]))     ->     loss / mask.sum().clamp(min=1)

Python's `len` only returns plain integers, and its `max` compares, which is impossible without values.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from partc.frontend.permissions import UNKNOWN_NUMBERS, permitted
from partc.frontend.selections.row_counts import PartSize, RowCount
from partc.frontend.selections.value_floats import ValueFloat, extreme, with_functions
from partc.replaced import all_replaced
from partc.torch_private import FakeTensor, said_class


def _length(x: Any, /) -> int:
    return x.size(0) if isinstance(x, Tensor) and x.dim() else builtins.len(x)


def _unknown(x: Any) -> bool:
    return isinstance(x, RowCount) or (isinstance(x, Tensor) and not x.dim())


def _scalar(x: Any) -> bool:
    return _unknown(x) or isinstance(x, int | float)


def _listed(items: Sequence[Any]) -> Tensor | None:
    """The tensor whose `tolist()` has these items; None for other lists."""
    parts = [x for x in items if isinstance(x, PartSize)]
    own = [x.counts is parts[0].counts and (x.first, x.last) for x in parts]
    return parts[0].counts if parts and own == [(i, i + 1) for i in range(len(items))] else None


def _extreme(plain: Callable[..., Any], limit: str, both: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            counts = _listed(args[0]) if isinstance(args[0], list | tuple) else args[0]
            if isinstance(counts, Tensor) and counts.dim() == 1:
                return getattr(counts, plain.__name__)()
        listed = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        if not kwargs and (found := extreme(listed, both)) is not None:
            return found
        if len(args) < 2 or kwargs or not any(map(_unknown, args)) or not all(map(_scalar, args)):
            return plain(*args, **kwargs)
        numbers = [x for x in args if not isinstance(x, Tensor | RowCount)]
        tensors = [x.tensor() if isinstance(x, RowCount) else x for x in args if isinstance(x, Tensor | RowCount)]
        made = tensors[0]
        for x in tensors[1:]:
            made = both(made, x)
        return made.clamp(**{limit: plain(numbers)}) if numbers else made

    return run


class _Kinds(type):
    """The metaclass of `_Type`: instance checks and calls behave like those of Python's `type`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        found = builtins.type(*args, **kwargs)
        if issubclass(found, FakeTensor):
            return said_class(args[0])
        found = args[0].__class__ if found.__module__.startswith("partc.") else found  # what a stand-in says it is
        known = {int: _Integer, float: _Float} if permitted(UNKNOWN_NUMBERS).allowed else {}
        return known.get(found, found)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, builtins.type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, builtins.type)

    def __getitem__(cls, item: Any) -> Any:
        return builtins.type[item]


class _Type(type, metaclass=_Kinds):
    """Python's `type`, except that stand-ins, such as a number of rows, have the type that they stand for."""


class _Number(type):
    """The metaclass of `_Integer` and `_Float`: instance checks and comparisons behave like those of Python's type."""

    plain: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.plain)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.plain)

    def __eq__(cls, other: object) -> bool:
        return other is cls.plain or other is cls

    def __hash__(cls) -> int:
        return hash(cls.plain)


class _Integers(_Number):
    plain = int

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            [x] = args
            if isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex()):
                x = x.item()
            if isinstance(x, RowCount):
                return x
        return builtins.int(*args, **kwargs)


class _Floats(_Number):
    plain = float

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            [x] = args
            if isinstance(x, Tensor) and not x.is_complex():
                x = x.item()
            if isinstance(x, RowCount):
                return ValueFloat(x.tensor().double(), builtins.int(x))
            if isinstance(x, ValueFloat):
                return x
        return builtins.float(*args, **kwargs)


class _Integer(int, metaclass=_Integers):
    """Python's `int`, except that a number of a tensor stays a stand-in."""


class _Float(float, metaclass=_Floats):
    """The same for Python's `float`."""


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "len": _length,
    "max": _extreme(max, "min", torch.maximum),
    "min": _extreme(min, "max", torch.minimum),
    "type": _Type,
}


@contextmanager
def using_traceable_builtins(modules: Iterable[ModuleType], **further: Callable[..., Any]) -> Iterator[None]:
    """A context in which these modules use the functions above, and `further` ones, in place of Python's."""
    with _replacing(modules, {**_FUNCTIONS, **further}):
        yield


@contextmanager
def keeping_unknown_numbers(modules: Iterable[ModuleType]) -> Iterator[None]:
    """A context in which `int` and `float` of a tensor are numbers of the trace in these modules, if they may be."""
    kept = {"int": _Integer, "float": _Float, "type": _Type} if permitted(UNKNOWN_NUMBERS).allowed else {}
    with _replacing(modules, kept), with_functions():
        yield


def _replacing(
    modules: Iterable[ModuleType], functions: Mapping[str, Callable[..., Any]]
) -> AbstractContextManager[None]:
    """A context in which modules that do not define these names have the functions."""
    return all_replaced(
        (home, name, function) for home in modules for name, function in functions.items() if name not in vars(home)
    )
