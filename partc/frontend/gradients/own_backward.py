"""The context of a trace in which a model may define gradients itself, or compute them.

Autograd functions, hooks, checkpoints and `torch.autograd.grad` are traced: see own_functions, hooks, checkpoints and
inner_gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import BuiltinMethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from partc.frontend.gradients.checkpoints import Checkpoints
from partc.frontend.gradients.hooks import Hook, NodeWithoutHooks, register_hook
from partc.frontend.gradients.inner_gradients import inner_gradient
from partc.frontend.gradients.own_functions import Pairs, followed, refused
from partc.installed import is_machinery
from partc.replaced import all_replaced, replaced
from partc.torch_private import CHECKPOINT, AppliedFunction, CheckpointFunction, checkpoint, inside_functorch


@contextmanager
def following_own_backward(
    modules: Mapping[str, nn.Module], say: Callable[[str], None], parts: int = 1, *, whole: bool = True
) -> Iterator[None]:
    """A context in which autograd functions and hooks are traced; what cannot be traced raises PartcError P0216.

    Calls of `torch.autograd.grad` are recorded; unless the trace is `whole`, they raise WholeTrace.

    The loss of the traced batch is divided by `parts`, and so are gradients that functions add themselves. Calls of
    `torch.utils.checkpoint` are reported to `say`. As in eager mode, reentrant calls return no gradient if no argument
    requires one, and batch norms within calls update their statistics once more, as backward computes them again.
    """
    checkpoints = Checkpoints(modules, say, whole=whole)
    enter = saved_tensors_hooks.__enter__

    def own_packing(hooks: saved_tensors_hooks) -> None:
        checkpoints.check_packing(hooks)
        enter(hooks)

    def hooked(x: Tensor, hook: Hook) -> RemovableHandle:
        return register_hook(x, hook, parts)

    with (
        _following_functions(checkpoints, parts, whole=whole),
        replaced(Tensor, grad_fn=property(_node_reader()), register_hook=hooked),
        replaced(saved_tensors_hooks, __enter__=own_packing),
        replaced(checkpoint, **{CHECKPOINT: checkpoints.around_call}),
    ):
        yield


@contextmanager
def _following_functions(checkpoints: Checkpoints, parts: int, *, whole: bool) -> Iterator[None]:
    """A context in which autograd functions, and gradients that the model computes, are traced."""
    apply, grad = vars(torch.autograd.Function)["apply"], torch.autograd.grad
    inner = inner_gradient(grad, whole)
    inside: list[Pairs] = []  # the gradients of weights that each running backward accumulates

    def own_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            return checkpoints.reentrant(args[0], args[2:])
        if _from_torch_or_partc(cls):
            return apply.__get__(None, cls)(*args, **kwargs)
        return followed(cls, args, kwargs, inside, parts)

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """The function that `Function.apply` calls before torch 2.15, also one that a model keeps, as in `double =
        Double.apply`.
        """
        if _from_torch_or_partc(cls):
            return super(AppliedFunction, cls).apply(*args, **kwargs)
        return own_apply(cls, *args, **kwargs)

    def new_node(node: Any) -> None:
        cls = type(node)._forward_cls
        if not _from_torch_or_partc(cls):  # a function that torch applies without the functions above
            raise refused(
                f"forward applies {cls.__name__} by a name of its apply, which a trace cannot follow",
                help=f"call {cls.__name__}.apply itself",
            )

    def own_grad(*args: Any, **kwargs: Any) -> Any:
        return grad(*args, **kwargs) if inside_functorch() else inner(*args, **kwargs)

    def own_backward(
        tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
        grad_variables: Any = None, inputs: Any = None,
    ) -> None:  # fmt: skip
        if not inside:
            raise refused("forward computes gradients itself")
        leaves = [*_leaves(tensors)] if inputs is None else [inputs] if isinstance(inputs, Tensor) else [*inputs]
        found = inner(tensors, leaves, grad_tensors, create_graph=create_graph, allow_unused=True)
        for x, g in zip(leaves, found, strict=True):
            if g is not None and isinstance(x, nn.Parameter):
                inside[-1].append((x, g))
            elif g is not None:
                x.grad = g if x.grad is None else x.grad + g

    with (
        replaced(torch.autograd, grad=own_grad, backward=own_backward),
        replaced(torch.autograd.Function, apply=classmethod(own_apply)),
        replaced(AppliedFunction, apply=classmethod(applied)),
        replaced(BackwardCFunction, __init__=new_node),
        all_replaced((home, name, partial(own_apply, cls)) for home, name, cls in _kept_applications()),
    ):
        yield


def _kept_applications(above: type[Any] = torch.autograd.Function) -> Iterator[tuple[ModuleType, str, type[Any]]]:
    """Names such as `double = Double.apply` in the modules of autograd functions. From torch 2.15 on they are bound
    to a function of C.
    """
    for cls in above.__subclasses__():
        if (home := sys.modules.get(cls.__module__)) is not None:
            for name, value in vars(home).items():
                if isinstance(value, BuiltinMethodType) and value.__name__ == "apply" and value.__self__ is cls:
                    yield home, name, cls
        yield from _kept_applications(cls)


def _node_reader() -> Callable[[Tensor], Any]:
    """The getter of `Tensor.grad_fn`. The model's code receives nodes that refuse hooks, torch's code the real ones."""
    nodes: Any = Tensor.grad_fn

    def node(x: Tensor) -> Any:
        found = nodes.__get__(x)
        outside = found is None or is_machinery(sys._getframe(1).f_code.co_filename)
        return found if outside else NodeWithoutHooks(found)

    return node


def _from_torch_or_partc(cls: type) -> bool:
    return cls.__module__.split(".")[0] in ("torch", "partc")


def _leaves(results: Any) -> Iterator[Tensor]:
    """The leaves of the autograd graph behind one or more tensors."""
    waiting: list[Any] = [x.grad_fn for x in ([results] if isinstance(results, Tensor) else results)]
    seen = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            waiting += [below for below, _ in node.next_functions]
