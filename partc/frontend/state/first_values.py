"""Attributes that forward gives their first values, found by a comparison of modules before and after a trace.

if self.state is None: self.state = torch.zeros(8)       a tensor in place of None
if not self.ready: self.ready = True                     a boolean that is another one
if not hasattr(self, "state"): ...                       a new attribute
if n > self.known: self.known = n                        an integer that later steps leave as it is
self.n += 1                                              left to frozen_state: the next step has another value
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partc.errors import PartcError
from partc.frontend.state.first_steps import unchanged, with_buffers
from partc.frontend.state.kept_attributes import own_attributes
from partc.runtime.first_steps import ABSENT, FirstSteps, FirstValue


@dataclass(slots=True)
class FirstStepsFound:
    """The first steps of a model, as soon as a trace has been refused because of them.

    `refusal` is the error of this trace, which stands if the model does not trace with first steps.
    """

    steps: FirstSteps | None = None
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None
    refusal: PartcError | None = None

    def installed(self, model: Any) -> Any:
        """The model, with the buffers of its first steps."""
        if self.steps is None or self.shapes is None or not isinstance(model, nn.Module):
            return model
        return with_buffers(model, self.steps, self.shapes)


@dataclass(frozen=True, slots=True)
class Attributes:
    """The attributes of a model's modules that may have first values: missing ones, None, booleans and integers."""

    named: Mapping[str, nn.Module]
    before: Mapping[str, tuple[Mapping[str, Any], frozenset[str]]]  # values that may change, and all names

    @classmethod
    def of(cls, named: Mapping[str, nn.Module]) -> Attributes:
        return cls(named, {path: (_open(module), frozenset(_held(module))) for path, module in named.items()})

    def changed(self) -> tuple[tuple[FirstValue, Tensor | None], ...]:
        """The attributes whose value is now a tensor, or another boolean or integer; each with its tensor, if any."""
        return tuple(self._changed())

    def _changed(self) -> Iterator[tuple[FirstValue, Tensor | None]]:
        for path, module in self.named.items():
            values, names = self.before[path]
            for name, now in _held(module).items():
                before = values.get(name, ABSENT)
                if (name in names and name not in values) or unchanged(before, now):
                    continue
                tensor, constant = (now, None) if isinstance(now, Tensor) else (None, now)
                if tensor is None and not isinstance(constant, int):
                    continue
                # The next backward pass would go through this step again, if the tensor had a gradient.
                if tensor is not None and (isinstance(before, int) or tensor.requires_grad or tensor.is_complex()):
                    continue
                value = FirstValue(
                    name=f"{path}.{name}" if path else name,
                    before=before,
                    after=constant,
                    persistent=name in module._buffers and name not in module._non_persistent_buffers_set,
                )
                yield value, tensor


def _held(module: nn.Module) -> dict[str, Any]:
    """The plain attributes and the buffers of a module."""
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    return own_attributes(module) | dict(module._buffers)


def _open(module: nn.Module) -> dict[str, Any]:
    return {name: x for name, x in _held(module).items() if x is None or isinstance(x, int)}


def first_steps(
    changed: tuple[tuple[FirstValue, Tensor | None], ...], model: nn.Module
) -> tuple[FirstSteps, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]:
    """The first steps with these values, and the shapes and dtypes of the tensors."""
    flag = "begun"
    while hasattr(model, flag):
        flag += "_"
    shapes = {value.name: (tuple(x.shape), x.dtype) for value, x in changed if x is not None}
    return FirstSteps(flag=flag, values=tuple(value for value, _ in changed)), shapes
