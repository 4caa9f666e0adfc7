"""Hooks on gradients: of tensors, weights, modules and nodes of the autograd graph.

    x.register_hook(lambda grad: grad * 2)      later readers of x read y
  ->
    grad  = incoming_gradient(x)
    twice = mul(grad, 2)                        the hook's operations
    y     = hook_gradient(x, …, twice)

A hook runs once while the model is traced, and its operations are part of the graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from partc.frontend.gradients.own_functions import fitted_gradient, followed, incoming_gradient, refused
from partc.torch_private import FULL_HOOKS, GLOBAL_HOOKS, GRADIENT_HOOKS, TENSOR_HOOKS

Hook = Callable[[Tensor], Tensor | None]


def own_hooks(modules: Mapping[str, nn.Module]) -> Mapping[str, tuple[Hook, ...]]:
    """The hooks on gradients of weights. Raises PartcError P0216 for hooks that wait for an accumulated gradient."""
    hooks, later = TENSOR_HOOKS
    found: dict[int, tuple[str, tuple[Hook, ...]]] = {}
    weights = ((path, *item) for path, module in modules.items() for item in module._parameters.items())
    for path, name, weight in weights:
        if getattr(weight, later, None):
            hook = next(iter(getattr(weight, later).values()))
            raise refused(f"{path}.{name} has a hook that waits for its accumulated gradient".lstrip("."), hook)
        if held := getattr(weight, hooks, None):
            found.setdefault(id(weight), (f"{path}.{name}".lstrip("."), tuple(held.values())))
    return dict(found.values())


class NodeWithoutHooks:
    """Stands for a node of the autograd graph, on which a trace would lose hooks."""

    __class__ = property(lambda stand_in: type(stand_in._node))

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise refused("forward puts a hook on a node of the autograd graph")
        return getattr(self._node, name)


class _GradientOfResult:
    """Stands for the gradient of a module's result, which hooks on the gradients of its operands cannot read in a
    trace.
    """

    def _read(self, *_: Any) -> Any:
        raise refused("a hook on a module's backward pass reads the gradient of its result")

    __getitem__ = __iter__ = __len__ = _read


@contextmanager
def module_hooks(modules: Mapping[str, nn.Module], parts: int = 1) -> Iterator[None]:
    """A context in which hooks on modules' backward passes are traced as hooks on their operands and results."""
    before, after = GRADIENT_HOOKS[1], GRADIENT_HOOKS[0]
    if hook := next((hook for kind in GLOBAL_HOOKS for hook in getattr(torch.nn.modules.module, kind).values()), None):
        raise refused("a hook is on the backward pass of all modules", hook)
    stores: list[tuple[nn.Module, dict[str, Any]]] = []
    handles: list[RemovableHandle] = []
    try:
        for name, module in modules.items():
            held = {kind: store for kind in GRADIENT_HOOKS if (store := getattr(module, kind, None))}
            if not held:
                continue
            if after in held and not getattr(module, FULL_HOOKS):
                raise refused(f"{name or type(module).__name__} has a hook of register_backward_hook")
            stores.append((module, held))
            for kind in held:
                setattr(module, kind, OrderedDict())
            for hook in held.get(after, {}).values():
                changed = lambda grads, hook=hook, module=module: hook(module, grads, _GradientOfResult())  # noqa: E731
                handles.append(module.register_forward_pre_hook(_gradient_hook(changed, hook, parts, results=False)))
            for hook in held.get(before, {}).values():
                changed = lambda grads, hook=hook, module=module: hook(module, grads)  # noqa: E731
                handles.append(module.register_forward_hook(_gradient_hook(changed, hook, parts, results=True)))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, held in stores:
            for kind, hooks in held.items():
                setattr(module, kind, hooks)


def _gradient_hook(changed: Callable[..., Any], hook: Any, parts: int, *, results: bool) -> Callable[..., Any]:
    """A forward hook that applies a backward hook to the gradients of a module's operands, or of its results."""

    class Hooked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> tuple[Any, ...]:
            return tuple(x.view_as(x) if isinstance(x, Tensor) else x for x in tensors)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            found = changed(grads)
            if found is None:
                raise refused("a hook reads a gradient without changing it", hook)
            return found if isinstance(found, tuple) else (found,)

    def run(module: nn.Module, args: tuple[Any, ...], *made: Any) -> Any:
        given = made[0] if results else args
        if not isinstance(given, Tensor | tuple):
            raise refused("a hook is on the backward pass of a module that returns neither a tensor nor a tuple")
        listed = given if isinstance(given, tuple) else (given,)
        if not torch.is_grad_enabled():
            return None
        if not any(isinstance(x, Tensor) and x.requires_grad for x in listed):
            if not results and changed(tuple(None for _ in listed)) is None:
                raise refused("a hook reads a gradient without changing it", hook)
            return None
        found = followed(Hooked, listed, {}, [], parts)
        return found if isinstance(given, tuple) else found[0]

    return run


def register_hook(x: Tensor, hook: Hook, parts: int = 1) -> RemovableHandle:
    """Trace a hook on a tensor's gradient; later readers of the tensor read the result of `hook_gradient`."""
    if not x.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    value = x.detach()
    changed = hook(incoming_gradient(value, parts))
    if changed is None:
        raise refused("a hook reads a gradient without changing it", hook)
    torch.ops.partc.hook_gradient(value, x, fitted_gradient(changed, x, parts), parts)
    return RemovableHandle(OrderedDict())
