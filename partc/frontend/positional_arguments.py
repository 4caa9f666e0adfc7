"""Calls of torch's functions with their operands by position: `numel(input=x)` is `numel(x)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

_FIRST = {"self": "input"}  # the name in Python of a schema's first argument


def by_position(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of a call. If all of them were given by keyword, its leading tensors are moved to positions."""
    if args or not kwargs or isinstance(func, FunctionType):
        return args, kwargs
    orders = [order for order in _orders(name) if order[0] in kwargs]
    for order in sorted(orders, key=lambda order: len(kwargs.keys() - order)):  # the overload with these keywords
        moved: list[Any] = []
        for key in order:
            if key not in kwargs or not _is_operand(kwargs[key]):
                break
            moved.append(kwargs[key])
        if moved:
            return (*moved,), {key: x for key, x in kwargs.items() if key not in order[: len(moved)]}
    return args, kwargs


def _is_operand(value: Any) -> bool:
    """Whether a value is a tensor, or a sequence of tensors."""
    return isinstance(value, Tensor) or (isinstance(value, Sequence) and any(isinstance(x, Tensor) for x in value))


@cache
def _orders(name: str) -> tuple[tuple[str, ...], ...]:
    """The names of the positional arguments of each overload of an operation, as Python spells them."""
    packet = getattr(torch.ops.aten, name, None)
    found: dict[tuple[str, ...], None] = {}
    for overload in packet.overloads() if packet is not None else ():
        names = [x.name for x in getattr(packet, overload)._schema.arguments if not x.kwarg_only]
        if names:
            found[(_FIRST.get(names[0], names[0]), *names[1:])] = None
    return (*found,)
