"""Refusal of custom gradients, which partc would not see.

partc differentiates the operations that forward runs. A `torch.autograd.Function` with a custom backward, or a hook on
gradients, would be lost, and a package would train differently from the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from partc.errors import PartcError
from partc.torch_private import GRADIENT_HOOKS, TENSOR_HOOKS


def refuse_hooks(model: nn.Module) -> None:
    """Raise PartcError P0216 if a module or a weight has a hook on its gradients."""
    found = [(name or type(model).__name__, module) for name, module in model.named_modules()]
    for name, module in found:
        if any(getattr(module, kind, None) for kind in GRADIENT_HOOKS):
            raise _refused(f"{name} has a hook on its backward pass")
    for name, weight in model.named_parameters():
        if any(getattr(weight, kind, None) for kind in TENSOR_HOOKS):
            raise _refused(f"{name} has a hook on its gradient")


@contextmanager
def without_own_backward() -> Iterator[None]:
    """A context in which the model's autograd functions and hooks raise PartcError P0216; torch's own run."""
    apply, hook = vars(torch.autograd.Function)["apply"], Tensor.register_hook

    def refused_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.split(".")[0] == "torch":
            return apply.__func__(cls, *args, **kwargs)
        raise _refused(f"{cls.__qualname__} is a torch.autograd.Function with a backward of its own")

    def refused_hook(tensor: Tensor, *args: Any) -> Any:
        raise _refused("forward puts a hook on a gradient")

    def refused_grad(*args: Any, **kwargs: Any) -> Any:
        raise _refused("forward computes gradients itself")

    grad, backward = torch.autograd.grad, torch.autograd.backward
    torch.autograd.grad = torch.autograd.backward = refused_grad
    torch.autograd.Function.apply = classmethod(refused_apply)  # type: ignore[assignment,method-assign]
    Tensor.register_hook = refused_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.grad, torch.autograd.backward = grad, backward
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        Tensor.register_hook = hook  # type: ignore[method-assign]


def _refused(what: str) -> PartcError:
    return PartcError("P0216", f"{what}, which partc cannot follow", help="use operations that torch differentiates")
