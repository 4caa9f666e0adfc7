"""Transforms of torch.func as operations on whole tensors.

    torch.vmap(scores)(rows)                     ->    the operations of scores, with a dimension of rows
    torch.func.jvp(f, (x,), (t,))                ->    those of f and of its derivative

torch's own rules of batches and derivatives make the operations, in a trace of the call alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from partc.torch_private import inside_functorch, tree_flatten, tree_unflatten, without_modes


@contextmanager
def transformed() -> Iterator[None]:
    """A context in which calls of torch.vmap, jvp and jacfwd are traced."""
    own = torch.vmap, torch.func.jvp, torch.func.jacfwd
    torch.vmap = torch.func.vmap = _of_function(own[0])
    torch.func.jvp, torch.func.jacfwd = _followed(own[1]), _of_function(own[2])
    try:
        yield
    finally:
        torch.vmap, torch.func.jvp, torch.func.jacfwd = own
        torch.func.vmap = own[0]


def _of_function(transform: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """A transform of torch.func whose results are traced as operations."""
    return lambda *args, **kwargs: _followed(transform(*args, **kwargs))


def _followed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs as the operations of a trace of its own; inside a transform it runs as it is."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if inside_functorch() else _traced(function, args, kwargs)

    return run


def _traced(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, form = tree_flatten((args, kwargs))
    places = [place for place, x in enumerate(leaves) if isinstance(x, Tensor)]
    shape: list[Any] = []

    def run(*tensors: Tensor) -> list[Any]:
        given = [*leaves]
        for place, x in zip(places, tensors, strict=True):
            given[place] = x
        again, named = tree_unflatten(given, form)
        results, made = tree_flatten(function(*again, **named))
        shape.append(made)
        return results

    tensors = [leaves[place] for place in places]
    with without_modes():
        graph = make_fx(run)(*tensors)
    graph.graph.eliminate_dead_code()  # tests of sizes
    graph.recompile()
    return tree_unflatten(graph(*tensors), shape[0])
