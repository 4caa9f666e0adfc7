"""Transforms of torch.func as operations on whole tensors.

    torch.vmap(scores)(rows)                     ->    the operations of scores, with a dimension of rows
    torch.func.jvp(f, (x,), (t,))                ->    those of f and of its derivative
    torch.func.grad(f)(x)                        ->    those of f and of its gradient
    y, pull = torch.func.vjp(f, x); pull(g)      ->    those of f and of torch.autograd.grad(y, x, g)

torch's own batching and derivative rules produce the operations, in a separate trace of the call; a product with a
Jacobian is a gradient within the model's own trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from partc.errors import PartcError
from partc.frontend.repeats.module_rows import WholeTrace
from partc.frontend.strided_views import SLICED
from partc.replaced import all_replaced
from partc.rules.derivatives import differentiable_derivatives
from partc.torch_private import (
    TRANSFORMS,
    FakeTensor,
    inside_functorch,
    loss_decompositions,
    norm_decompositions,
    transform_traced,
    tree_flatten,
    tree_unflatten,
)


@contextmanager
def following_transforms(*, whole: bool) -> Iterator[None]:
    """A context in which transforms are traced, also those that modules have imported by name.

    Raises PartcError P0216 for jacrev outside another transform. Unless the trace is `whole`, gradients raise
    WholeTrace: calls that the trace leaves out have none.
    """
    with all_replaced(
        (module, attribute, _followed(name, getattr(module, attribute), whole))
        for name, (module, attribute) in TRANSFORMS.items()
    ):
        yield


def _followed(name: str, function: Callable[..., Any], whole: bool) -> Callable[..., Any]:
    """A transform that runs as the operations of a separate trace; inside another transform it runs unchanged."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if name in ("grad", "vjp") and not whole:
            raise WholeTrace
        if inside_functorch():
            return function(*args, **kwargs)
        if name == "vjp":
            if "argnums" in kwargs:  # jacrev pulls all vectors at once, in a vmap
                raise _batched_pull()
            return _with_pull(*args, **kwargs)
        return _traced(function, args, kwargs)

    return run


def _batched_pull() -> PartcError:
    return PartcError(
        "P0216",
        "forward computes several products with a Jacobian at once by torch.func, which partc cannot follow",
        help="call torch.autograd.grad(values, inputs, vector, create_graph=True) for each vector, or jacrev in a vmap",
    )


def _with_pull(function: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """`torch.func.vjp`: the results, and the function from their gradients to those of the operands.

    `function` gets aliases of the operands, so that gradients from other uses of the operands are left out.
    """
    leaves, form = tree_flatten(primals)
    outside = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in leaves]
        made = function(*tree_unflatten(inputs, form))
    results, *aux = made if has_aux else (made,)
    values, shape = tree_flatten(results)

    def pull(gradients: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        if inside_functorch():
            raise _batched_pull()
        pairs = [pair for pair in zip(values, tree_flatten(gradients)[0], strict=True) if pair[0].requires_grad]
        found: Sequence[Tensor] = [torch.zeros_like(x) for x in leaves]
        if pairs:
            found = torch.autograd.grad(
                [value for value, _ in pairs],
                inputs,
                [gradient for _, gradient in pairs],
                retain_graph=retain_graph,
                create_graph=torch.is_grad_enabled() if create_graph is None else create_graph,
                materialize_grads=True,
            )
        return tree_unflatten([*found], form)

    seen = values if outside else [x.detach() for x in values]
    return tree_unflatten(seen, shape), pull, *aux


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
    with transform_traced():
        try:
            graph = _graph(run, tensors)
        except AssertionError:
            # A tensor that the function makes and changes in place has values, until it would have a gradient as well.
            with next((x.fake_mode for x in tensors if isinstance(x, FakeTensor)), nullcontext()):
                graph = _graph(run, tensors)
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten._linalg_check_errors.default:  # a guard, which a package does not run
            graph.graph.erase_node(node)
        elif node.target is torch.ops.aten._to_copy.default and not isinstance(node.args[0], fx.Node):
            # A vmap makes tensors of Python numbers that stand before a tensor.
            node.target, node.args = torch.ops.aten.full.default, ([], *node.args)
    graph.graph.eliminate_dead_code()  # removes tests of sizes
    graph.recompile()
    return tree_unflatten(_Replay(graph).run(*tensors), shape[0])


def _graph(run: Callable[..., list[Any]], tensors: Sequence[Tensor]) -> fx.GraphModule:
    """The operations of a function, from those that can be differentiated again where it has derivatives."""
    losses = loss_decompositions()
    graph = make_fx(run, decomposition_table=losses)(*tensors)
    operations = {str(node.target) for node in graph.graph.nodes}
    changed = "aten.as_strided.default" in operations  # the derivative of a change of a view
    if not changed and not any("_backward" in name for name in operations):
        return graph
    table = {**differentiable_derivatives(), **norm_decompositions(), **losses, **SLICED}
    with sdpa_kernel(SDPBackend.MATH):
        return make_fx(torch.func.functionalize(run) if changed else run, decomposition_table=table)(*tensors)


class _Replay(fx.Interpreter):
    """Runs operations again under autograd. Raises PartcError P0216 if a gradient would be lost."""

    def run_node(self, node: fx.Node) -> Any:
        made = super().run_node(node)
        if isinstance(made, tuple | list):
            read = [x for place, x in enumerate(made) if any(user.args[1] == place for user in node.users)]
            lost = [x for x in read if x.is_floating_point() and not x.requires_grad]
            if None in made or (lost and any(x.requires_grad for x in made)):
                raise PartcError(
                    "P0216",
                    f"a transform of torch.func goes through {node.target}, whose second derivative partc cannot trace",
                    help="compute it from operations that torch differentiates twice",
                )
        return made
