"""Backward operations, decomposed into operations that have derivatives themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from partc.torch_private import OpOverload, backward_decompositions


@cache
def differentiable_derivatives() -> Mapping[OpOverload, Callable[..., Any]]:
    """For each operation of torch's backward passes: a function that computes it from differentiable operations."""
    return {**backward_decompositions(), torch.ops.aten.convolution_backward.default: _of_convolution}


def _of_convolution(
    grad: Tensor, x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of a convolution as convolutions."""
    sizes = x.shape[2:], w.shape[2:], grad.shape[2:]
    steps = [_per_dim(each, len(sizes[0])) for each in (stride, padding, dilation)]
    of_x = of_w = None
    if mask[0] and transposed:
        of_x = torch.ops.aten.convolution(grad, w, None, *steps, False, [0], groups)
    elif mask[0]:
        rest = [
            size - ((out - 1) * s - 2 * p + d * (kernel - 1) + 1)
            for size, kernel, out, s, p, d in zip(*sizes, *steps, strict=True)
        ]
        of_x = torch.ops.aten.convolution(grad, w, None, *steps, True, rest, groups)
    if mask[1]:
        ends = (grad, x) if transposed else (x, grad)  # a transposed convolution is one from its result to its operand
        pairs = zip(*(each.chunk(groups, 1) for each in ends), strict=True)
        of_w = torch.cat([_of_kernel(one, other, sizes[1], steps) for one, other in pairs])
    of_bias = grad.sum([0, *range(2, grad.dim())]) if mask[2] else None
    return of_x, of_w, of_bias


def _of_kernel(x: Tensor, grad: Tensor, kernel: Sequence[int], steps: Sequence[Sequence[int]]) -> Tensor:
    """The gradient of a convolution's kernel, of one group. `steps` are the stride, the padding and the dilation."""
    transposed, (stride, padding, dilation) = (x.transpose(0, 1), grad.transpose(0, 1)), steps
    made: Tensor = torch.ops.aten.convolution(*transposed, None, dilation, padding, stride, False, [0], 1)
    for dim, size in enumerate(kernel):
        made = made.narrow(dim + 2, 0, size)
    return made.transpose(0, 1)


def _per_dim(given: Sequence[int], dims: int) -> list[int]:
    return [*given] if len(given) == dims else [given[0]] * dims
