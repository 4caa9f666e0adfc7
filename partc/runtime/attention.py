"""Attention with an explicit backward, by the fastest of torch's kernels that can.

Shapes: b batch, h query heads, g key and value heads (g divides h), s and t positions, k and v head sizes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """q[b, h, s, k], k[b, g, t, k], v[b, g, t, v] -> out[b, h, s, v], and lse[b, h, s] for backward.

    `mask` broadcasts to [b, h, s, t]: True where a position is read, or numbers added to the scores.
    """
    q, k, v = map(_rows, (q, k, v))
    aten = torch.ops.aten
    kernel = _kernel(q, k, v, mask, is_causal)
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=_additive(mask, q), scale=scale
        )
        return out, lse
    if kernel == "flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
        return out, lse
    keys, values = (repeat_heads(x, q.shape[1]) for x in (k, v))
    if kernel == "efficient":
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, keys, values, None, True, 0.0, is_causal, scale=scale
        )
        return out, lse
    scores = scores_of(q, keys, mask, is_causal, scale)
    lse = scores.logsumexp(-1)
    weights = _weights(scores, lse)
    return (weights @ values.to(weights.dtype)).to(q.dtype), lse


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of `out`, with what `attention` returned."""
    grad, q, k, v, out = map(_rows, (grad, q, k, v, out))
    aten = torch.ops.aten
    kernel = _kernel(q, k, v, mask, is_causal)
    # The kernels for CPUs and flash attention let heads of q share one of k and v.
    keys, values = (x if kernel in ("cpu", "flash") else repeat_heads(x, q.shape[1]) for x in (k, v))
    if kernel == "cpu":
        grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, keys, values, out, lse, 0.0, is_causal, attn_mask=_additive(mask, q), scale=scale
        )
    elif kernel == "flash":
        seed, lengths = _no_dropout(q), (q.shape[2], k.shape[2])
        grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_backward(
            grad, q, keys, values, out, lse, None, None, *lengths, 0.0, is_causal, seed, seed, scale=scale
        )
    elif kernel == "efficient":
        seed, wanted = _no_dropout(q), [True, True, True, False]
        grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, keys, values, None, out, lse, seed, seed, 0.0, wanted, is_causal, scale=scale
        )
    else:
        weights = _weights(scores_of(q, keys, mask, is_causal, scale), lse)
        wide_grad = grad.to(weights.dtype)
        grad_v = (weights.mT @ wide_grad).to(v.dtype)
        along = (wide_grad * out).sum(-1, keepdim=True)
        grad_scores = weights * (wide_grad @ values.to(weights.dtype).mT - along)
        grad_scores *= 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        grad_q = (grad_scores @ keys.to(weights.dtype)).to(q.dtype)
        grad_k = (grad_scores.mT @ q.to(weights.dtype)).to(k.dtype)
    return grad_q, sum_heads(grad_k, k.shape[1]), sum_heads(grad_v, v.shape[1])


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> str:
    """Which of torch's fused kernels computes this; none of them: the scores are written out."""
    if q.shape[-1] != v.shape[-1] or 0 in (*q.shape, *k.shape):
        return "none"
    if not q.is_cuda:
        known = q.dtype in (torch.float32, torch.float64, torch.bfloat16)
        return "cpu" if known and (mask is None or mask.dim() in (2, 4)) else "none"
    # On GPUs a causal mask of a rectangle has another corner in each kernel, and masks need aligned rows.
    square = not is_causal or q.shape[2] == k.shape[2]
    if mask is not None or not square or q.shape[-1] % 8 or q.shape[-1] > 256:
        return "none"
    if q.dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(q.device) >= (8, 0):
        return "flash"
    return "efficient" if q.dtype == torch.float32 else "none"


def _rows(x: Tensor) -> Tensor:
    """Kernels read rows whose elements are neighbours, and don't check (a gather may leave others)."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _no_dropout(q: Tensor) -> Tensor:
    """Where the kernels look for the seed of a dropout of 0."""
    return torch.zeros((), dtype=torch.int64, device=q.device)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[b, g, t, d] -> [b, heads, t, d]: each key or value head serves its neighbouring query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def sum_heads(grad: Tensor, groups: int) -> Tensor:
    return grad if grad.shape[1] == groups else grad.reshape(grad.shape[0], groups, -1, *grad.shape[2:]).sum(2)


def _additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)
    return mask.to(q.dtype)


def scores_of(q: Tensor, keys: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    dtype = row_dtype(q)
    scores = (q.to(dtype) @ keys.to(dtype).mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        s, t = scores.shape[-2:]
        hidden = torch.ones(s, t, dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(hidden, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Softmax from the saved normaliser; rows that read nothing are zero."""
    return (scores - lse.unsqueeze(-1)).exp_().nan_to_num_(nan=0.0)


def row_dtype(x: Tensor) -> torch.dtype:
    """What rows are summed in: 32 bits at least."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
