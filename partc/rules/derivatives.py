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
    if transposed or (mask[1] and groups != 1):
        return NotImplemented  # type: ignore[no-any-return]
    sizes = x.shape[2:], w.shape[2:], grad.shape[2:]
    steps = [_per_dim(each, len(sizes[0])) for each in (stride, padding, dilation)]
    of_x = of_w = None
    if mask[0]:
        rest = [
            size - ((out - 1) * s - 2 * p + d * (kernel - 1) + 1)
            for size, kernel, out, s, p, d in zip(*sizes, *steps, strict=True)
        ]
        of_x = torch.ops.aten.convolution(grad, w, None, steps[0], steps[1], steps[2], True, rest, groups)
    if mask[1]:
        turned = x.transpose(0, 1), grad.transpose(0, 1)
        of_w = torch.ops.aten.convolution(*turned, None, steps[2], steps[1], steps[0], False, [0], 1)
        for dim, kernel in enumerate(sizes[1]):
            of_w = of_w.narrow(dim + 2, 0, kernel)
        of_w = of_w.transpose(0, 1)
    of_bias = grad.sum([0, *range(2, grad.dim())]) if mask[2] else None
    return of_x, of_w, of_bias


def _per_dim(given: Sequence[int], dims: int) -> list[int]:
    return [*given] if len(given) == dims else [given[0]] * dims
