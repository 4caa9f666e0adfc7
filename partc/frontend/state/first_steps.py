"""Steps of a model whose forward sets attributes in the first one: buffers take the place of these attributes.

if self.state is None:                          a package computes in every step:
    self.state = torch.zeros(8)                 old = where(begun, state, zeros)
self.state = 0.9 * self.state + 0.1 * x         state.copy_(0.9 * old + 0.1 * x); begun.fill_(True)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from partc.runtime.first_steps import ABSENT, FirstSteps, FirstValue


class UnsettledError(Exception):
    """A later step leaves another value in an attribute than the first step."""


def with_buffers(
    model: nn.Module, steps: FirstSteps, shapes: Mapping[str, tuple[Sequence[int], torch.dtype]]
) -> nn.Module:
    """The model with buffers of zeros in place of the attributes; `shapes` has their shapes and dtypes by name."""
    for value in steps.values:
        part, name = _place(value, model)
        if value.is_tensor:
            shape, dtype = shapes[value.name]
            vars(part).pop(name, None)
            part._buffers[name] = torch.zeros(tuple(shape), dtype=dtype)
            if not value.persistent:
                part._non_persistent_buffers_set.add(name)
    model.register_buffer(steps.flag, torch.zeros((), dtype=torch.bool), persistent=False)
    return model


@contextmanager
def step_of(model: nn.Module, steps: FirstSteps) -> Iterator[None]:
    """A context in which the attributes have the values that they have before this step; afterwards the buffers are the
    tensors that forward has left.

    Raises UnsettledError if forward leaves no tensor, one of another shape, or another constant.
    """
    begun = bool(model.get_buffer(steps.flag))
    places = [(value, *_place(value, model)) for value in steps.values]
    buffers = {value.name: part._buffers[name] for value, part, name in places if value.is_tensor}
    constants = {value.name: vars(part).get(name, ABSENT) for value, part, name in places if not value.is_tensor}
    for value, part, name in places:
        if not value.is_tensor:
            _put(vars(part), name, value.after if begun else value.before)
        elif not begun:
            _put(part._buffers, name, value.before)
        elif hasattr(type(part), name):  # the class's own attribute would hide a buffer
            vars(part)[name] = part._buffers.pop(name)
    yield
    for value, part, name in places:
        if value.is_tensor:
            now = vars(part).pop(name) if name in vars(part) else part._buffers.get(name)
            old = buffers[value.name]
            if not isinstance(now, Tensor) or old is None or now.shape != old.shape:
                raise UnsettledError(value.name)
            part._buffers[name] = now
        else:
            if not unchanged(value.after, vars(part).get(name, ABSENT)):
                raise UnsettledError(value.name)
            _put(vars(part), name, constants[value.name])
    model.get_buffer(steps.flag).fill_(True)


def unchanged(before: Any, now: Any) -> bool:
    """Whether an attribute is the same object, or an equal integer."""
    return before is now or (isinstance(before, int) and type(before) is type(now) and before == now)


def _place(value: FirstValue, model: nn.Module) -> tuple[nn.Module, str]:
    """The module of an attribute, and its name there."""
    owner, _, name = value.name.rpartition(".")
    return model.get_submodule(owner), name


def _put(store: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, str):
        store.pop(name, None)
    else:
        store[name] = value
