"""Attention with an explicit backward, by a fused kernel if possible (runtime/ops/attention_kernels.py).

Shapes: b batch, h query heads, g key and value heads (g divides h), s and t positions, k and v head sizes. Forward
returns the output and the log-sum-exp of each row's scores; the scores are never whole in memory, nor saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ..random import Draw, dropout_backward
from .attention_kernels import AttentionKernel, Case, chosen_kernel, on_cpu

SMALL = 1 << 24  # the most elements of a mask that is materialised for a fused kernel
MOST = 1 << 22  # the most scores in a block, over all heads: they fit into a GPU's cache


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
    limits: Tensor | None = None,
    keys: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q[b, h, s, k], k[b, g, t, k], v[b, g, t, v] -> out[b, h, s, v], and the rows' log-sum-exps for backward.

    `mask` broadcasts to [b, h, s, t]: booleans (True: the position is read), or numbers that are added to the scores.
    With a window, positions at that distance or farther are not read. `sinks[h]` are the scores of one further position
    without a value, which takes its share of every row's softmax. `limits[b, s, n]` and `keys[b, t]` are integers whose
    first dimension broadcasts: a position is read if an odd number of the row's limits are at most its key. By default
    keys are the positions' numbers.
    """
    mask, limits = spelled_out(mask, limits, keys, q, k)
    kernel = fused_kernel(q, k, v, mask, is_causal, window, limits)
    if kernel is None:
        out, lse = attention_in_blocks(q, k, v, mask, is_causal, _scale(q, scale), window, limits=limits, keys=keys)
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks)
    given = {"is_causal": is_causal, "scale": _scale(q, scale)}
    padded, keys, values = _operands(kernel, q, k, v)
    aten = torch.ops.aten
    if kernel.name == "cpu":
        bias = _additive(mask, q)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
            padded, keys, values, attn_mask=bias, **given
        )
    elif kernel.name == "cudnn":
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention.default(padded, keys, values, None, True, **given)
    elif kernel.name == "flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention.default(padded, keys, values, **given)
    else:
        bias = _aligned_bias(mask, q, k)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention.default(padded, keys, values, bias, True, **given)
    out = out[..., : v.shape[-1]]
    if sinks is None:
        return out, lse
    out, lse = with_sinks(out, plain_lse(lse, q, mask, is_causal), sinks)
    return out, kernels_lse(lse, kernel.name)


def spelled_out(
    mask: Tensor | None, limits: Tensor | None, keys: Tensor | None, q: Tensor, k: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The mask and limits; small limits are replaced by the mask that they describe."""
    if limits is None or max(len(limits), len(q)) * q.shape[2] * k.shape[2] > SMALL:
        return mask, limits
    if mask is not None and mask.dtype != torch.bool:
        return mask, limits
    read = within(limits, keys, k.shape[2])
    return (read if mask is None else read & mask), None


def within(limits: Tensor, keys: Tensor | None, t: int) -> Tensor:
    """Whether each position is read, bool[b, 1, s, t]; positions without a key are not."""
    if keys is None:
        keys = torch.arange(t, device=limits.device)[None]
    elif keys.shape[1] < t:
        keys = F.pad(keys, (0, t - keys.shape[1]), value=torch.iinfo(keys.dtype).min)
    read = limits[..., :1] <= keys[:, None]
    for place in range(1, limits.shape[-1]):
        read = read ^ (limits[..., place : place + 1] <= keys[:, None])
    return read[:, None]


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The results of attention with sinks[h] from the results without: out[b, h, s, v] and lse[b, h, s].

    Sinks scale a row by exp(lse - lse'), which is a sigmoid. From these results, attention's backward computes the true
    weights, and so the right gradients of queries, keys and values.
    """
    own = sinks.to(lse.dtype).unsqueeze(-1)
    return (out * torch.sigmoid(lse - own).unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, own)


def attention_sinks_backward(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of sinks[h] from that of `out`, with the results of attention with sinks."""
    wide = row_dtype(out)
    along = (grad.to(wide) * out).sum(-1)
    share = (sinks.to(wide).unsqueeze(-1) - plain_lse(lse, out)).exp_()
    return -(share * along).sum((0, 2)).to(sinks.dtype)


def plain_lse(lse: Tensor, q: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """A kernel's log-sum-exps as [b, h, s]; with the mask, minus infinity where a row reads nothing."""
    lse = lse.reshape(*q.shape[:2], -1)[..., : q.shape[2]]  # GPU kernels pad it
    if mask is None:
        return lse
    read = mask if mask.dtype == torch.bool else mask != -math.inf
    if is_causal:
        read = read & torch.ones(q.shape[2], read.shape[-1], dtype=torch.bool, device=mask.device).tril_()
    return lse.masked_fill(~read.any(-1), -math.inf)


def kernels_lse(lse: Tensor, kernel: str) -> Tensor:
    """Log-sum-exps [b, h, s] in the form that a kernel's backward reads."""
    if kernel == "cudnn":
        return lse.unsqueeze(-1).contiguous()
    if kernel == "efficient":
        return F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
    return lse.contiguous()


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
    window: int = 0,
    limits: Tensor | None = None,
    keys: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from that of `out`, with the results of `attention`."""
    mask, limits = spelled_out(mask, limits, keys, q, k)
    kernel = fused_kernel(q, k, v, mask, is_causal, window, limits)
    if kernel is None:
        return attention_in_blocks_backward(
            *(grad, q, k, v, out, lse, mask, is_causal, _scale(q, scale), window), limits=limits, keys=keys
        )[:3]
    given = {"is_causal": is_causal, "scale": _scale(q, scale)}
    padded, keys, values = _operands(kernel, q, k, v)
    outward, out = (_rows(_wider(x, values.shape[-1])) for x in (grad, out))
    whole, aten = (outward, padded, keys, values), torch.ops.aten
    if kernel.name == "cpu":
        bias = _additive(mask, q)
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            *whole, out, lse, 0.0, attn_mask=bias, **given
        )
    else:
        none = torch.zeros((), dtype=torch.int64, device=q.device)  # seed and offset, unused without dropout
        lengths = (q.shape[2], k.shape[2])
        if kernel.name == "cudnn":
            found = aten._scaled_dot_product_cudnn_attention_backward.default(
                *whole, out, lse, none, none, None, None, None, *lengths, 0.0, **given
            )
        elif kernel.name == "flash":
            found = aten._scaled_dot_product_flash_attention_backward.default(
                *whole, out, lse, None, None, *lengths, 0.0, is_causal, none, none, scale=given["scale"]
            )
        else:
            bias, wanted = _aligned_bias(mask, q, k), [True, True, True, False]
            found = aten._scaled_dot_product_efficient_attention_backward.default(
                *whole, bias, out, lse, none, none, 0.0, wanted, **given
            )
    return _gradients(found[:3], q, k, v)


def attention_bias_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    limits: Tensor | None = None,
    keys: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with the gradient of `mask`, which is added to the scores."""
    kernel = fused_kernel(q, k, v, mask, is_causal, window, limits)
    if kernel is None or kernel.name == "cpu":  # the CPU kernel does not compute a gradient of its mask
        found = attention_in_blocks_backward(
            *(grad, q, k, v, out, lse, mask, is_causal, _scale(q, scale), window),
            learned=True,
            limits=limits,
            keys=keys,
        )
        assert found[3] is not None
        return (*found[:3], found[3])
    padded, keys, values = _operands(kernel, q, k, v)
    outward, out = (_rows(_wider(x, values.shape[-1])) for x in (grad, out))
    bias, none = _aligned_bias(mask, q, k), torch.zeros((), dtype=torch.int64, device=q.device)
    *found_, grad_bias = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
        *(outward, padded, keys, values, bias, out, lse, none, none, 0.0),
        [True, True, True, True],
        is_causal,
        scale=_scale(q, scale),
    )
    return (*_gradients(found_, q, k, v), _summed_to(grad_bias, mask))


def attention_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    window: int,
    p: float,
    draw: Draw,
    sinks: Tensor | None = None,
    limits: Tensor | None = None,
    keys: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with dropout of its weights: out[b, h, s, v], and the log-sum-exps of the score rows before dropout.

    `draw` provides the random numbers of all weights [b, h, s, t]; backward draws them again.
    """
    out, lse = attention_in_blocks(
        *(q, k, v, mask, is_causal, _scale(q, scale), window, p, draw), limits=limits, keys=keys
    )
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


def attention_dropout_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float | None,
    window: int,
    p: float,
    draw: Draw,
    limits: Tensor | None = None,
    keys: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of the output."""
    return attention_in_blocks_backward(
        *(grad, q, k, v, out, lse, mask, is_causal, _scale(q, scale), window, p, draw), limits=limits, keys=keys
    )[:3]


def attention_dropout_bias_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float | None,
    window: int,
    p: float,
    draw: Draw,
    limits: Tensor | None = None,
    keys: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with the gradient of `mask`, which is added to the scores."""
    found = attention_in_blocks_backward(
        *(grad, q, k, v, out, lse, mask, is_causal, _scale(q, scale), window, p, draw),
        learned=True,
        limits=limits,
        keys=keys,
    )
    assert found[3] is not None
    return (*found[:3], found[3])


def fused_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    window: int,
    limits: Tensor | None = None,
) -> AttentionKernel | None:
    """The fused kernel; None if attention runs in blocks."""
    if limits is not None or not (q.dim() == k.dim() == v.dim() == 4):
        return None
    (_, heads, s, d), (_, groups, t, e) = q.shape, v.shape
    case = Case(q.dtype, heads, groups, s, t, d, e, masked=mask is not None, causal=is_causal, window=window)
    if not q.is_cuda:
        return on_cpu(case)
    return chosen_kernel(case, q.device.index or 0).kernel


def kernel_name(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> str:
    """The fused kernel that attention runs in; empty if it runs in blocks."""
    kernel = fused_kernel(q, k, v, mask, is_causal, 0)
    return "" if kernel is None else kernel.name


def _operands(kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operands in the kernel's form: heads are padded with zeros, which do not change scores."""
    width, value_width = (-(-x.shape[-1] // kernel.multiple) * kernel.multiple for x in (q, v))
    if kernel.equal:
        width = value_width = max(width, value_width)
    if not kernel.grouped:
        k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
    return _rows(_wider(q, width)), _rows(_wider(k, width)), _rows(_wider(v, value_width))


def _gradients(found: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's gradients without padding."""
    grad_q, grad_k, grad_v = (x[..., : like.shape[-1]] for x, like in zip(found, (q, k, v), strict=True))
    return grad_q, sum_heads(grad_k, k.shape[1]), sum_heads(grad_v, v.shape[1])


def _wider(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _rows(x: Tensor) -> Tensor:
    """The tensor with contiguous rows, aligned to 16 bytes on GPUs: kernels assume this without a check."""
    loose = x.stride(-1) != 1 and x.shape[-1] != 1
    if x.is_cuda and not loose:
        places = (x.storage_offset(), *(x.stride(dim) for dim in range(x.dim() - 1) if x.shape[dim] > 1))
        loose = any(place * x.element_size() % 16 for place in places)
    return x.contiguous() if loose else x


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[b, g, t, d] -> [b, heads, t, d]: each key or value head serves consecutive query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def sum_heads(grad: Tensor, groups: int) -> Tensor:
    """[b, heads, t, d] -> [b, g, t, d]: the transpose of `repeat_heads`."""
    return grad if grad.shape[1] == groups else grad.reshape(grad.shape[0], groups, -1, *grad.shape[2:]).sum(2)


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask as numbers to add to the scores, in four dimensions that broadcast to theirs."""
    if mask is None:
        return None
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)
    return mask.to(q.dtype)


def _aligned_bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The same for GPU kernels: in the scores' shape, with rows that start at multiples of 16 elements."""
    bias = _additive(mask, q)
    if bias is None:
        return None
    t = k.shape[2]
    rows = bias.new_zeros(*bias.shape[:-1], -(-t // 16) * 16)[..., :t]
    return rows.copy_(bias).expand(q.shape[0], q.shape[1], q.shape[2], t)


def _summed_to(grad: Tensor, mask: Tensor) -> Tensor:
    """The gradient of an operand that was broadcast, summed to its shape."""
    spread = [dim for dim in range(grad.dim()) if dim < grad.dim() - mask.dim() or mask.shape[dim - grad.dim()] == 1]
    whole = grad.sum(spread, keepdim=True, dtype=row_dtype(grad)) if spread else grad
    return whole.reshape(mask.shape).to(mask.dtype)


def attention_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    window: int = 0,
    p: float = 0.0,
    draw: Draw | None = None,
    ahead: int = 0,
    limits: Tensor | None = None,
    keys: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention by plain operations, one block of scores at a time.

    The first query is `ahead` positions after the first key.
    """
    b, heads, s, _ = q.shape
    scale = _scale(q, scale)
    wide, t = row_dtype(q), k.shape[2]
    out = q.new_empty(b, s, heads, v.shape[-1]).transpose(1, 2)
    lse = q.new_empty(b, heads, s, dtype=wide)
    for part, rows in _parts(b, heads, s, t, window, q.is_meta):
        seen = _columns_read(rows, t, is_causal, window, ahead)
        seen, read = _block_columns(limits, keys, part, rows, seen)
        columns, values = (repeat_heads(x[part, :, seen], heads).to(wide) for x in (k, v))
        hidden = _hidden(rows, seen, is_causal, window, ahead, q.device)
        hidden = hidden if read is None else ~read if hidden is None else hidden | ~read
        scores = _scores(q[part, :, rows], columns, mask_part(mask, part, rows, seen), hidden, scale)
        norms = scores.logsumexp(-1)
        weights = _weights(scores, norms)
        if draw is not None:
            weights = dropout_backward(weights, draw.part(part, slice(None), rows, seen).below(1 - p), p)
        out[part, :, rows] = (weights @ values).to(q.dtype)
        lse[part, :, rows] = norms
    return out, lse


def attention_in_blocks_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    window: int = 0,
    p: float = 0.0,
    draw: Draw | None = None,
    learned: bool = False,
    ahead: int = 0,
    limits: Tensor | None = None,
    keys: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and, if it is learned, of the mask; each block's scores are recomputed."""
    b, heads, s, _ = q.shape
    scale = _scale(q, scale)
    wide, t = row_dtype(q), k.shape[2]
    grad_q = torch.empty_like(q)
    grad_k, grad_v = (torch.zeros(b, heads, t, x.shape[-1], dtype=wide, device=q.device) for x in (k, v))
    grad_mask = torch.zeros(mask.shape, dtype=wide, device=q.device) if learned and mask is not None else None
    for part, rows in _parts(b, heads, s, t, window, q.is_meta):
        seen = _columns_read(rows, t, is_causal, window, ahead)
        seen, read = _block_columns(limits, keys, part, rows, seen)
        columns, values = (repeat_heads(x[part, :, seen], heads).to(wide) for x in (k, v))
        queries, outward = q[part, :, rows], grad[part, :, rows].to(wide)
        hidden = _hidden(rows, seen, is_causal, window, ahead, q.device)
        hidden = hidden if read is None else ~read if hidden is None else hidden | ~read
        scores = _scores(queries, columns, mask_part(mask, part, rows, seen), hidden, scale)
        weights = _weights(scores, lse[part, :, rows])
        grad_weights = outward @ values.mT
        dropped = weights
        if draw is not None:
            kept = draw.part(part, slice(None), rows, seen).below(1 - p)
            dropped, grad_weights = (dropout_backward(x, kept, p) for x in (weights, grad_weights))
        grad_v[part, :, seen] += dropped.mT @ outward
        along = (outward * out[part, :, rows]).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - along)
        if grad_mask is not None and mask is not None:
            where = mask_part(grad_mask, part, rows, seen)
            assert where is not None
            where += _summed_to(grad_scores, where)
        grad_scores *= scale
        grad_q[part, :, rows] = (grad_scores @ columns).to(q.dtype)
        grad_k[part, :, seen] += grad_scores.mT @ queries.to(wide)
    grad_k, grad_v = sum_heads(grad_k, k.shape[1]).to(k.dtype), sum_heads(grad_v, v.shape[1]).to(v.dtype)
    return grad_q, grad_k, grad_v, grad_mask if grad_mask is None or mask is None else grad_mask.to(mask.dtype)


def _parts(b: int, heads: int, s: int, t: int, window: int = 0, largest: bool = False) -> Iterator[tuple[slice, slice]]:
    """The blocks, as slices of the batch and of the score rows; with `largest`, only the largest one, to count
    memory.
    """
    t = min(t, 4 * window) if window else t  # the most columns that a block of at most 2 * window rows reads
    each = max(1, heads * s * t)
    count, length = max(1, MOST // each), s if each <= MOST else max(1, MOST // max(1, heads * t))
    length = max(1, min(length, 2 * window) if window else length)
    if largest:
        yield slice(0, min(b, count)), slice(max(0, s - length), s)
        return
    for first in range(0, b, count):
        for start in range(0, s, length):
            yield slice(first, min(b, first + count)), slice(start, min(s, start + length))


def _columns_read(rows: slice, t: int, is_causal: bool, window: int, ahead: int) -> slice:
    """The columns that some of these rows read."""
    first = min(t, max(0, rows.start + ahead - window + 1)) if window else 0
    last = rows.stop + ahead if is_causal else rows.stop + ahead + window - 1 if window else t
    return slice(first, max(first, min(t, last)))


def _block_columns(
    limits: Tensor | None, keys: Tensor | None, part: slice, rows: slice, seen: slice
) -> tuple[slice, Tensor | None]:
    """The range of columns that some row of a block reads by its limits, and whether each row reads each of them."""
    if limits is None:
        return seen, None
    limits = mask_part(limits.unsqueeze(1), part, rows, slice(0, limits.shape[-1]))
    assert limits is not None
    at = torch.arange(seen.start, seen.stop, device=limits.device)[None] if keys is None else keys[:, seen]
    at = at[part] if len(at) > 1 else at
    read = within(limits[:, 0], at, seen.stop - seen.start)
    if read.is_cpu:  # on a GPU, the host would wait for the device
        some = read.flatten(0, -2).any(0).nonzero()
        first, last = (int(some[0]), int(some[-1]) + 1) if len(some) else (0, min(1, read.shape[-1]))
        seen, read = slice(seen.start + first, seen.start + last), read[..., first:last]
    return seen, read


def _hidden(rows: slice, seen: slice, is_causal: bool, window: int, ahead: int, device: torch.device) -> Tensor | None:
    """A mask that is true for the scores of a block that attention leaves out; None if it leaves none out."""
    if not is_causal and not window:
        return None
    own, read = (torch.arange(part.start, part.stop, dtype=torch.int32, device=device) for part in (rows, seen))
    distance = own[:, None] + ahead - read
    hidden = distance < 0 if is_causal else distance <= -window
    return hidden | (distance >= window) if window else hidden


def mask_part(mask: Tensor | None, part: slice | None, rows: slice, seen: slice) -> Tensor | None:
    """A view of the part of a mask that a block reads; without `part`, for the whole batch."""
    if mask is None:
        return None
    for dim, cut in ((-4, part), (-2, rows), (-1, seen)):
        if cut is not None and mask.dim() >= -dim and mask.shape[dim] > 1:
            mask = mask.narrow(dim, cut.start, cut.stop - cut.start)
    return mask


def _scores(q: Tensor, keys: Tensor, mask: Tensor | None, hidden: Tensor | None, scale: float) -> Tensor:
    """The scores of some rows, without those that are hidden."""
    scores = (q.to(keys.dtype) @ keys.mT) * scale
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """The softmax weights from the saved log-sum-exps; rows that read no position are zero."""
    return (scores - lse.unsqueeze(-1)).exp_().nan_to_num_(nan=0.0)


def row_dtype(x: Tensor) -> torch.dtype:
    """The dtype for statistics of rows: at least 32 bits."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
