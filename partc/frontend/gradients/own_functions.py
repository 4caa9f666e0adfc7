"""Gradients that a model defines itself by `torch.autograd.Function`s.

    y = Double.apply(x)               # backward returns grad * 2
  ->
    y_value = …                       # forward's operations
    grad    = incoming_gradient(y_value)
    twice   = mul(grad, 2)            # backward's operations
    y       = own_gradient((y_value,), (x,), (twice,))

Both functions run once while the model is traced. The operations of backward are part of the graph, so that rules cut
them like all others. `partc.passes.differentiate` later moves them behind the gradient that they read.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from partc.errors import PartcError, Source
from partc.frontend.state.generator_states import returning
from partc.ir import operators  # noqa: F401 (defines the operators)
from partc.runtime.torch_private import tree_map_only

Pairs = list[tuple[Tensor, Tensor]]  # tensors with their gradients
_Returned = tuple[Tensor | None, ...]


class _Context:
    """The `ctx` of a traced function, with which forward passes values to backward."""

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs)
        self.saved_tensors: tuple[Any, ...] = ()
        self.without_gradient: tuple[Tensor, ...] = ()
        self.materialize_grads = True

    @property
    def saved_variables(self) -> tuple[Any, ...]:
        """The saved tensors by their old name."""
        return self.saved_tensors

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.without_gradient = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise refused("an autograd.Function changes its operands in place")

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value


def followed(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inside: list[Pairs], parts: int) -> Any:
    """The results of an autograd function, with the gradients that its backward defines."""
    apart = cls.setup_context is not torch.autograd.Function.setup_context
    if apart:  # forward takes no context, but arguments by name
        bound = inspect.signature(cls.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args = bound.args
    needs = [isinstance(arg, Tensor) and arg.requires_grad and torch.is_grad_enabled() for arg in args]
    context = _Context(needs)
    given = tuple(
        arg.detach().requires_grad_(needed) if isinstance(arg, Tensor) else arg
        for arg, needed in zip(args, needs, strict=True)
    )
    with torch.no_grad():
        made = cls.forward(*given) if apart else cls.forward(context, *given)
    if apart:
        cls.setup_context(context, given, made)
    own = {id(x): arg for x, arg in zip(given, args, strict=True)}
    held = tree_map_only(Tensor, lambda x: own.get(id(x), x), vars(context))
    vars(context).update(held)  # backward may differentiate with respect to operands, as closures read them
    results = list(made) if isinstance(made, tuple) else [made]
    flat = {id(x) for x in context.without_gradient}
    carrying = [
        place
        for place, x in enumerate(results)
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and id(x) not in flat
    ]
    results = [x.detach() if isinstance(x, Tensor) else x for x in results]
    if any(needs) and carrying:
        grads = [torch.zeros_like(x) if isinstance(x, Tensor) else None for x in results]
        for place in carrying:
            grads[place] = incoming_gradient(results[place], parts)
        for places, found, leaves in _backward(cls, context, grads, carrying, inside):
            returned = zip(args, found, needs, strict=False)
            pairs = [(arg, g) for arg, g, needed in returned if needed and g is not None]
            pairs = [(arg, fitted_gradient(g, arg, parts)) for arg, g in (*pairs, *leaves)]
            if pairs:
                operands, gradients = map(list, zip(*pairs, strict=True))
                values = [results[place] for place in places]
                owned = torch.ops.partc.own_gradient(values, operands, gradients)
                for place, x in zip(places, owned, strict=True):
                    results[place] = x
    return tuple(results) if isinstance(made, tuple) else results[0]


def _backward(
    cls: Any, context: _Context, incoming: Sequence[Tensor | None], carrying: list[int], inside: list[Pairs]
) -> list[tuple[list[int], _Returned, Pairs]]:
    """Groups of results, each with the operands' gradients that backward returns for it, and the weights' gradients
    that it accumulates by `torch.autograd.backward`.

    Without materialized gradients, the gradient of a result that the loss does not read is None. A trace only knows at
    its end which results are read. So backward runs once for each result, with None for the others, and the gradients
    are summed. If it fails on None, it runs once with all gradients.
    """

    def run(given: Sequence[Tensor | None], places: list[int]) -> tuple[list[int], _Returned, Pairs]:
        inside.append([])
        try:
            # Backward runs behind all of forward's draws, and only repeats earlier ones. It records no gradient.
            with returning(), torch.no_grad():
                backward = cls.backward if cls.backward is not torch.autograd.Function.backward else cls.vjp
                found = backward(context, *given)
        finally:
            weights = inside.pop()
        return places, found if isinstance(found, tuple) else (found,), weights

    if len(carrying) > 1 and not context.materialize_grads:
        with suppress(TypeError, AttributeError):
            return [run([x if i == place else None for i, x in enumerate(incoming)], [place]) for place in carrying]
    return [run(incoming, carrying)]


def incoming_gradient(x: Tensor, parts: int) -> Tensor:
    """The incoming gradient of x for the undivided loss of the traced batch."""
    incoming: Tensor = torch.ops.partc.incoming_gradient(x)
    return incoming if parts == 1 else incoming * parts


def fitted_gradient(gradient: Tensor, x: Tensor, parts: int) -> Tensor:
    """A gradient in the tensor's shape and dtype, as autograd requires, divided by `parts` like the loss."""
    gradient = gradient if parts == 1 else gradient / parts
    if gradient.shape != x.shape:
        gradient = gradient.sum_to_size(x.shape)
    return gradient.to(x.dtype).detach()


def refused(what: str, hook: Any = None, help: str = "use operations that torch differentiates") -> PartcError:
    code = getattr(hook, "__code__", None)
    return PartcError(
        "P0216",
        f"{what}, which partc cannot follow",
        help=help,
        source=None if code is None else Source(file=code.co_filename, line=code.co_firstlineno),
    )
