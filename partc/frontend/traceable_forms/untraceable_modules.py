"""Traceable forward passes for modules of torch that read values as Python numbers.

nn.BatchNorm*d(momentum=None)       torch converts the tensor that counts batches to a number
nn.AdaptiveLogSoftmaxWithLoss       every cluster computes all rows; torch selects the rows of its classes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partc.replaced import all_replaced
from partc.torch_private import AdaptiveLosses, BatchNorm


@contextmanager
def untraceable_modules() -> Iterator[None]:
    """A context in which these modules run the forward passes of this file."""
    with all_replaced((kind, "forward", forward(vars(kind)["forward"])) for kind, forward in _FORWARD.items()):
        yield


def _batch_norm(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(norm: BatchNorm, x: Tensor) -> Tensor:
        number, mean, var = norm.num_batches_tracked, norm.running_mean, norm.running_var
        if norm.momentum is not None or not norm.training or number is None or mean is None or var is None:
            return plain(norm, x)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        with torch.no_grad():
            number.add_(1)
            share = number.reciprocal().to(mean.dtype)
            mean.mul_(1 - share).add_(share * x.mean(dims))
            var.mul_(1 - share).add_(share * x.var(dims))
        return F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)

    return forward


def _adaptive_softmax(plain: Callable[..., AdaptiveLosses]) -> Callable[..., AdaptiveLosses]:
    def forward(module: nn.AdaptiveLogSoftmaxWithLoss, input_: Tensor, target_: Tensor) -> AdaptiveLosses:
        if target_.dim() > 1 or input_.dim() != target_.dim() + 1 or input_.shape[:-1] != target_.shape:
            return plain(module, input_, target_)  # which raises
        rows, labels = input_.reshape(-1, input_.shape[-1]), target_.reshape(-1)
        place, tails = labels, torch.zeros_like(rows[:, 0])
        for number, tail in enumerate(module.tail):
            first, last = module.cutoffs[number : number + 2]
            inside = (labels >= first) & (labels < last)
            chosen = (labels - first).clamp(0, last - first - 1)[:, None]
            tails = tails + torch.where(inside, F.log_softmax(tail(rows), 1).gather(1, chosen)[:, 0], 0.0)
            place = torch.where(inside, module.shortlist_size + number, place)
        output = tails + F.log_softmax(module.head(rows), 1).gather(1, place[:, None])[:, 0]
        return AdaptiveLosses(output.reshape(target_.shape), -output.mean())

    return forward


_FORWARD: Mapping[type[nn.Module], Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    BatchNorm: _batch_norm,
    nn.AdaptiveLogSoftmaxWithLoss: _adaptive_softmax,
}
