"""Functions of the emitted code that are not a single torch call, each with an explicit backward.

Shapes: rows are any leading dimensions; c is the number of classes (of this rank, if the vocabulary is sharded).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from ..random import dropout, dropout_backward
from .accumulation import add_product, add_sum, add_sums, in_rows, materialized
from .assignment import linear_sum_assignment
from .attention import (
    attention,
    attention_backward,
    attention_bias_backward,
    attention_dropout,
    attention_dropout_backward,
    attention_dropout_bias_backward,
    attention_sinks_backward,
    row_dtype,
)
from .attention_rows import attention_rows, attention_rows_backward, ring_attention, ring_attention_backward
from .bags import bag_max, bag_max_grad, bag_sum, bag_sum_grad
from .chunked_loss import gradients_of_logits, rows_of_logits
from .embedding import (
    embedding_add_grad,
    embedding_grad,
    embedding_rows,
    embedding_shard,
    embedding_shard_add_grad,
    embedding_shard_grad,
    embedding_shard_rows,
)
from .experts import (
    combine,
    dispatch,
    divide_rows,
    expert_matmul,
    expert_matmul_add_grad_weight,
    expert_matmul_grad_rows,
    expert_matmul_grad_weight,
    expert_order,
    expert_places,
    expert_rows_grad,
    route,
    start_combine,
    start_dispatch,
)
from .pairs import index_pairs, index_pairs_add
from .rotary import rotary, rotary_backward

__all__ = [
    "add_product",
    "add_sum",
    "add_sums",
    "attention",
    "attention_backward",
    "attention_bias_backward",
    "attention_dropout",
    "attention_dropout_backward",
    "attention_dropout_bias_backward",
    "attention_rows",
    "attention_rows_backward",
    "attention_sinks_backward",
    "bag_max",
    "bag_max_grad",
    "bag_sum",
    "bag_sum_grad",
    "combine",
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_rows",
    "dispatch",
    "divide_rows",
    "dropout",
    "dropout_backward",
    "embedding_add_grad",
    "embedding_grad",
    "embedding_rows",
    "embedding_shard",
    "embedding_shard_add_grad",
    "embedding_shard_grad",
    "embedding_shard_rows",
    "expert_matmul",
    "expert_matmul_add_grad_weight",
    "expert_matmul_grad_rows",
    "expert_matmul_grad_weight",
    "expert_order",
    "expert_places",
    "expert_rows_grad",
    "fourier",
    "index_pairs",
    "index_pairs_add",
    "layer_norm",
    "layer_norm_backward",
    "linear_add_grad_weight",
    "linear_cross_entropy",
    "linear_cross_entropy_add_grad",
    "linear_cross_entropy_backward",
    "linear_grad_bias",
    "linear_grad_weight",
    "linear_sum_assignment",
    "log_sum_exp",
    "mask_classes",
    "materialized",
    "pick",
    "ring_attention",
    "ring_attention_backward",
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "rotary_backward",
    "route",
    "selected_places",
    "shard_max",
    "smooth_sum",
    "start_combine",
    "start_dispatch",
    "sum_exp",
]

# -- selections --------------------------------------------------------------------------------


def selected_places(mask: Tensor, count: int) -> Tensor:
    """For each selected element of `mask` [rows, n], the number of selected ones before it in its row, as int64 [rows,
    n].

    Raises RuntimeError unless every row selects `count` elements; on GPUs at the next synchronisation.
    """
    before = mask.cumsum(1)
    message = f"each example of a mask has to select {count} elements"
    torch.ops.aten._assert_async.msg((before[:, -1] == count).all(), message)
    return (before - 1).clamp_min_(0)


# -- linear ------------------------------------------------------------------------------------


def linear_grad_weight(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of w[o, i] in y[*rows, o] = x[*rows, i] wᵀ, from the gradient of y."""
    return in_rows(grad).t() @ in_rows(x)


def linear_add_grad_weight(into: Tensor, grad: Tensor, x: Tensor) -> None:
    """The same, added to the gradient buffer, without a temporary if possible."""
    add_product(into, in_rows(grad).t(), in_rows(x))


def linear_grad_bias(grad: Tensor) -> Tensor:
    """Gradient of b[o] in y[*rows, o] = ... + b."""
    return in_rows(grad).sum(0)


# -- Fourier transforms ------------------------------------------------------------------------


def fourier(x: Tensor, dims: tuple[int, ...], inverse: bool) -> Tensor:
    """The transform over `dims`, without a scale, of complex numbers as pairs in the last dimension.

    Its transpose, and so its gradient, is the transform in the other direction.
    """
    numbers = torch.view_as_complex(x.contiguous())
    if inverse:
        return torch.view_as_real(torch.fft.ifftn(numbers, dim=dims, norm="forward"))
    return torch.view_as_real(torch.fft.fftn(numbers, dim=dims))


# -- norms -------------------------------------------------------------------------------------


def rms_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """The normalised rows, and each row's 1 / rms for backward."""
    if x.is_cuda:
        out, rstd = torch.ops.aten._fused_rms_norm.default(x, shape, weight, eps)
        return out, rstd
    dims = tuple(range(-len(shape), 0))
    eps = torch.finfo(row_dtype(x)).eps if eps is None else eps
    rstd = x.to(row_dtype(x)).square().mean(dims, keepdim=True).add_(eps).rsqrt_()
    out = (x * rstd).to(x.dtype)
    return out if weight is None else out.mul_(weight), rstd


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: tuple[int, ...], weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and weight (Zhang and Sennrich 2019, appendix A)."""
    if x.is_cuda:
        wanted = [True, weight is not None]
        grad_x, grad_weight = torch.ops.aten._fused_rms_norm_backward.default(grad, x, shape, rstd, weight, wanted)
        return grad_x, grad_weight
    dims, rows = tuple(range(-len(shape), 0)), tuple(range(x.dim() - len(shape)))
    unit = x * rstd
    grad_unit = grad if weight is None else grad * weight
    grad_weight = None if weight is None else _summed(grad * unit, rows).to(weight.dtype)
    along = (grad_unit * unit).mean(dims, keepdim=True)
    return unit.mul_(along).sub_(grad_unit).mul_(-rstd).to(x.dtype), grad_weight


def _summed(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The sum over these dimensions; torch sums over all if there are none."""
    return x.sum(dims) if dims else x


def layer_norm(
    x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised rows, and each row's mean and 1 / deviation for backward."""
    out, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
    if x.is_cuda:
        return out, mean, rstd
    return out, mean.to(row_dtype(x)), rstd.to(row_dtype(x))  # on a CPU, statistics of 16-bit rows have 16 bits


def layer_norm_backward(
    grad: Tensor, x: Tensor, shape: tuple[int, ...], weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias."""
    wanted = [True, weight is not None, weight is not None]
    if not x.is_cuda:
        dtype = x.dtype if weight is None else weight.dtype
        mean, rstd = mean.to(dtype), rstd.to(dtype)
    # The gradient doesn't depend on the bias; torch only needs to know that there is one.
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward.default(
        grad, x, shape, mean, rstd, weight, weight, wanted
    )
    return grad_x, grad_weight, grad_bias


# -- cross-entropy -----------------------------------------------------------------------------
# Per row: nll = (1 - smoothing) · w[y] · (lse - x[y]) + smoothing / classes · Σ_c w[c] · (lse - x[c]),
# and 0 where y is ignored. Rows are computed in float32 at least. Where the vocabulary is sharded,
# collectives in the emitted code combine the pieces of the ranks.


def mask_classes(logits: Tensor, classes: int, rank: int = 0) -> Tensor:
    """Minus infinity for padded classes: logits[*rows, c] belong to the classes from rank·c on."""
    here = logits.shape[-1]
    place = torch.arange(rank * here, (rank + 1) * here, device=logits.device)
    return logits.masked_fill(place >= classes, float("-inf"))


def cross_entropy(
    logits: Tensor, labels: Tensor, weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """logits[*rows, c], labels[*rows] -> per-row losses and log-sum-exp, both [*rows]."""
    largest = shard_max(logits)
    lse = log_sum_exp(largest, sum_exp(logits, largest))
    smooth = smooth_sum(logits, weight) if label_smoothing else None
    nll = cross_entropy_rows(
        lse, pick(logits, labels), labels, weight, ignore_index, label_smoothing, smooth, logits.shape[-1]
    )
    return nll, lse


def shard_max(logits: Tensor) -> Tensor:
    """[*rows, c] -> [*rows]: combine by maximum."""
    return logits.amax(-1).to(row_dtype(logits))


def sum_exp(logits: Tensor, largest: Tensor) -> Tensor:
    """Σ exp(logits - largest): [*rows, c], [*rows] -> [*rows]: combine by sum."""
    return (logits.to(largest.dtype) - largest.unsqueeze(-1)).exp_().sum(-1)


def pick(logits: Tensor, labels: Tensor, offset: int = 0) -> Tensor:
    """The label's logit if this rank has it, else 0: [*rows, c], [*rows] -> [*rows]: combine by sum."""
    local = labels - offset
    outside = (local < 0) | (local >= logits.shape[-1])
    picked = logits.gather(-1, local.masked_fill_(outside, 0).unsqueeze(-1)).squeeze(-1)
    return picked.to(row_dtype(logits)).masked_fill_(outside, 0)


def smooth_sum(logits: Tensor, weight: Tensor | None = None) -> Tensor:
    """Σ_c w[c] · logits[c], with this rank's class weights: [*rows, c] -> [*rows]: combine by sum."""
    rows = logits.to(row_dtype(logits))
    return rows.sum(-1) if weight is None else rows @ weight.to(rows.dtype)


def log_sum_exp(largest: Tensor, sums: Tensor) -> Tensor:
    """From the combined pieces, [*rows] each."""
    return sums.log() + largest


def cross_entropy_rows(
    lse: Tensor,
    picked: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smooth: Tensor | None = None,
    num_classes: int = 0,
) -> Tensor:
    """Per-row losses from the combined pieces; `weight` and `num_classes` refer to the whole vocabulary."""
    ignored = labels == ignore_index
    nll = lse - picked
    if weight is not None:
        nll = nll * weight.to(nll.dtype)[labels.masked_fill(ignored, 0)]
    if label_smoothing:
        assert smooth is not None
        total = num_classes if weight is None else weight.to(nll.dtype).sum()
        nll = nll * (1 - label_smoothing) + (lse * total - smooth) * (label_smoothing / num_classes)
    return nll.masked_fill(ignored, 0)


def cross_entropy_backward(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    offset: int = 0,
    num_classes: int = 0,
) -> Tensor:
    """The gradient of this rank's logits from the gradient of the per-row losses: [*rows] -> [*rows, c].

    `offset` is this rank's first class; `weight` and `num_classes` refer to the whole vocabulary (`num_classes` 0: it
    is not sharded).
    """
    classes = logits.shape[-1]
    ignored = labels == ignore_index
    hit = grad.masked_fill(ignored, 0).to(lse.dtype)  # the gradient of each row's lse - x[y]
    spread = hit * (label_smoothing / (num_classes or classes))
    hit = hit * (1 - label_smoothing) if label_smoothing else hit
    if weight is not None:
        weight = weight.to(lse.dtype)
        hit = hit * weight[labels.masked_fill(ignored, 0)]
        spread_total = spread * weight.sum()
    else:
        spread_total = spread * (num_classes or classes)
    result = (logits.to(lse.dtype) - lse.unsqueeze(-1)).exp_()
    result *= (hit + spread_total if label_smoothing else hit).unsqueeze(-1)
    if label_smoothing:
        mine = 1.0 if weight is None else weight[offset : offset + classes]
        result -= spread.unsqueeze(-1) * mine
    local = labels - offset
    outside = (local < 0) | (local >= classes)
    result.scatter_add_(
        -1, local.masked_fill_(outside, 0).unsqueeze(-1), hit.masked_fill(outside, 0).neg_().unsqueeze(-1)
    )
    return result.to(logits.dtype)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunks: int,
    bias: Tensor | None = None,
    offset: int = 0,
    smooth: bool = False,
    class_weight: Tensor | None = None,
    kernels: ModuleType | None = None,
) -> list[Tensor]:
    """The pieces `shard_max`, `sum_exp` relative to it, `pick`, and with `smooth` `smooth_sum`, of x weightᵀ + bias in
    chunks.

    x[*rows, d], weight[c, d], labels[*rows] -> [*rows] each, to be combined over ranks if classes are sharded.
    `kernels` are the package's `kernels.logits`.
    """

    def ask(logits: Tensor, labels: Tensor, made: Sequence[Tensor]) -> None:
        if kernels is not None:
            kernels.numbers(logits, labels, *made, weight=class_weight, offset=offset)
            return
        largest = made[0].copy_(shard_max(logits))
        below = largest.masked_fill(largest == -torch.inf, 0)  # if all of these classes are padding
        made[1].copy_(sum_exp(logits, below))
        made[2].copy_(pick(logits, labels, offset))
        if smooth:
            made[3].copy_(smooth_sum(logits, class_weight))

    made = [torch.empty(labels.shape, dtype=row_dtype(x), device=x.device) for _ in range(4 if smooth else 3)]
    rows_of_logits(x, weight, labels, bias, chunks, ask, made, even=kernels is not None)
    return made


def linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    lse: Tensor,
    *,
    chunks: int,
    bias: Tensor | None = None,
    bias_trained: bool = False,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    offset: int = 0,
    num_classes: int = 0,
    kernels: ModuleType | None = None,
) -> tuple[Tensor, ...]:
    """The gradients of x, of weight, and of bias if it is trained, from that of the per-row losses.

    Logits are recomputed in chunks. The gradients of weight and bias are summed in at least fp32. The other arguments
    are as in `cross_entropy_backward`.
    """
    into = torch.zeros(weight.shape, dtype=row_dtype(x), device=x.device)
    bias_into = torch.zeros(len(weight), dtype=row_dtype(x), device=x.device) if bias_trained else None
    grad_x = linear_cross_entropy_add_grad(
        into,
        grad,
        x,
        weight,
        labels,
        lse,
        chunks=chunks,
        bias=bias,
        bias_into=bias_into,
        class_weight=class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        offset=offset,
        num_classes=num_classes,
        kernels=kernels,
    )
    return (grad_x, into) if bias_into is None else (grad_x, into, bias_into)


def linear_cross_entropy_add_grad(
    into: Tensor | None,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    lse: Tensor,
    *,
    chunks: int,
    bias: Tensor | None = None,
    bias_into: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    offset: int = 0,
    num_classes: int = 0,
    kernels: ModuleType | None = None,
) -> Tensor:
    """The same with the gradients of weight and bias added to buffers; returns the gradient of x.

    A weight or bias that is not trained has no buffer.
    """
    whole = num_classes or len(weight)
    total = class_weight.to(lse.dtype).sum() if kernels and class_weight is not None and label_smoothing else None

    def gradient(grad: Tensor, logits: Tensor, labels: Tensor, lse: Tensor) -> Tensor:
        how = (ignore_index, label_smoothing, offset, whole)
        if kernels is None:
            return cross_entropy_backward(grad, logits, labels, lse, class_weight, *how)
        kernels.gradient_(grad, logits, labels, lse, class_weight, total, *how)
        return logits

    even = kernels is not None
    return gradients_of_logits(grad, x, weight, labels, lse, bias, chunks, gradient, into, bias_into, even=even)
