"""Gradients that a forward pass computes: `torch.autograd.grad` in a penalty, a force, an equation or an inner step.

    e = model(x)                                           e = …
    g, = torch.autograd.grad(e.sum(), x, create_graph=True)    g = inner_gradient((sum,), (x,), (ones,))

The trace records the call as one operation, and `partc.passes.normalize.inner_gradients` expands it. Its results are
part of torch's autograd graph, so that calls can be nested and the parameters with a gradient are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from partc.errors import PartcError
from partc.frontend.repeats.module_rows import WholeTrace
from partc.torch_private import without_modes

_library = torch.library.Library("partc", "FRAGMENT")
_library.define("inner_gradient(Tensor[] outputs, Tensor[] inputs, Tensor[] seeds) -> Tensor[]")
_library.impl("inner_gradient", lambda outputs, inputs, seeds: list(map(torch.empty_like, inputs)),
              "CompositeExplicitAutograd")  # fmt: skip
_library.impl("inner_gradient", torch.library.fallthrough_kernel, "Autograd")


class _Standing(torch.autograd.Function):
    """Replaces values that autograd computed by the equal recorded ones; gradients still flow through autograd's
    graph.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *(None for _ in grads), *grads


def inner_gradient(compute: Callable[..., Sequence[Tensor | None]], whole: bool) -> Callable[..., Any]:
    """A function in place of `torch.autograd.grad`, which computes with `compute`.

    Unless the trace is `whole`, the function asks for such a trace by raising WholeTrace: calls of modules that are
    left out of a trace have no graph of autograd.
    """

    def run(
        outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None,
        create_graph: bool = False, only_inputs: bool = True, allow_unused: bool | None = None,
        is_grads_batched: bool = False, materialize_grads: bool = False,
    ) -> tuple[Tensor | None, ...] | dict[str, Tensor | None]:  # fmt: skip
        if not whole:
            raise WholeTrace
        if is_grads_batched:
            help = "call torch.autograd.grad once for each gradient"
            raise _refused("torch.autograd.grad is called with is_grads_batched", help)
        listed = [outputs] if isinstance(outputs, Tensor) else [*outputs]
        named = inputs if isinstance(inputs, dict) else None
        wanted = [inputs] if isinstance(inputs, Tensor) else [*(inputs if named is None else named.values())]
        given = [grad_outputs] if isinstance(grad_outputs, Tensor) else [*(grad_outputs or [None] * len(listed))]
        if any(seed is None and x.numel() != 1 for x, seed in zip(listed, given, strict=True)):
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        seeds = [torch.ones_like(x) if seed is None else seed for x, seed in zip(listed, given, strict=True)]
        try:
            with without_modes():
                found = compute(listed, wanted, seeds, create_graph=True, allow_unused=True)
        except NotImplementedError:
            help = "write the function with operations that torch differentiates, and leave the hook out"
            raise _refused("torch.autograd.grad goes through an autograd.Function or a hook", help) from None
        absent = [x is None for x in found]
        if any(absent) and not (allow_unused or (allow_unused is None and materialize_grads)):
            raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph.")
        used = [x for x, missing in zip(wanted, absent, strict=True) if not missing]
        made = torch.ops.partc.inner_gradient.default(listed, used, seeds)
        if create_graph:
            made = _Standing.apply(len(made), *made, *(x for x in found if x is not None))
        else:
            made = [x.detach() for x in made]
        rest = iter(made)
        results = tuple(
            next(rest) if not missing else torch.zeros_like(x) if materialize_grads else None
            for x, missing in zip(wanted, absent, strict=True)
        )
        return results if named is None else dict(zip(named, results, strict=True))

    return run


def _refused(what: str, help: str) -> PartcError:
    return PartcError("P0216", f"{what}, which partc cannot follow", help=help)
