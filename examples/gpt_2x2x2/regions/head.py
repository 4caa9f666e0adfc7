"""Region head.

Emitted by partc from model.py for pp=2,dp=2,tp=2. Comments give the whole tensor's type:

    f32[16@dp,mb, 64]  each rank has its part of the 16 rows: dp cuts them, and mb, the microbatches, once more
    partial(tp)        each rank of tp has a contribution, which is still to be combined with the others
    vary(tp)           equal on the ranks of tp, which use it differently: its gradient is their sum
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from runtime.comm.comm import Comm
from runtime.ops import functional
from torch import Tensor
from torch.nn import functional as F


class HeadParams(NamedTuple):
    norm_weight: Tensor  # f32[64] vary(dp,mb,tp)
    head_weight: Tensor  # f32[256@tp, 64] vary(dp,mb)


@dataclass(slots=True)
class HeadSaved:
    """Tensors that forward keeps for backward, which deletes the large ones after their last use."""

    x: Tensor  # f32[16@dp,mb, 32@tp, 64]
    labels: Tensor  # i64[16@dp,mb, 32]
    count: Tensor  # f32[] vary(dp,mb)
    norm_rstd: Tensor  # f32[16@dp,mb, 32@tp, 1]
    norm_full: Tensor  # f32[16@dp,mb, 32, 64] vary(tp)
    logits: Tensor  # f32[16@dp,mb, 32, 256@tp]
    nll_lse: Tensor  # f32[16@dp,mb, 32]


def head_forward(
    comm: Comm,
    p: HeadParams,
    x: Tensor,  # f32[16@dp,mb, 32@tp, 64]
    labels: Tensor,  # i64[16@dp,mb, 32]
    count: Tensor,  # f32[] vary(dp,mb)
) -> tuple[Tensor, HeadSaved]:
    """head (gpt.py:109)."""
    # norm: f32[16@dp,mb, 32@tp, 64], norm_rstd: f32[16@dp,mb, 32@tp, 1]
    norm, norm_rstd = functional.rms_norm(x, (64,), p.norm_weight, 1e-05)
    # all-gather 8.0 KiB over tp: head needs all of dim 1
    norm_full = comm.tp.all_gather(norm, dim=1)  # f32[16@dp,mb, 32, 64] vary(tp)
    del norm
    logits = F.linear(norm_full, p.head_weight)  # f32[16@dp,mb, 32, 256@tp]
    nll_max_partial = functional.shard_max(logits)  # f32[16@dp,mb, 32] partial(tp)
    # all-reduce 256 B over tp, while what follows runs: the largest of every rank's, for gpt.py:131
    nll_max_work = comm.tp.start_all_reduce_(nll_max_partial, "max")  # f32[16@dp,mb, 32]
    nll_picked_partial = functional.pick(logits, labels, offset=comm.tp.rank * 128)  # f32[16@dp,mb, 32] partial(tp)
    nll_max = nll_max_work.wait()  # f32[16@dp,mb, 32]
    nll_sums_partial = functional.sum_exp(logits, nll_max)  # f32[16@dp,mb, 32] partial(tp)
    nll_sums_and_nll_picked_partial = torch.cat(
        (nll_sums_partial, nll_picked_partial)
    )  # f32[2 · 16@dp,mb, 32] partial(tp)
    # all-reduce 512 B over tp: each rank has a part of the sum in gpt.py:131
    nll_sums_and_nll_picked = comm.tp.all_reduce_(nll_sums_and_nll_picked_partial)  # f32[2 · 16@dp,mb, 32]
    nll_sums, nll_picked = nll_sums_and_nll_picked.split((2, 2))  # each f32[16@dp,mb, 32]
    nll_lse = functional.log_sum_exp(nll_max, nll_sums)  # f32[16@dp,mb, 32]
    nll = functional.cross_entropy_rows(nll_lse, nll_picked, labels)  # f32[16@dp,mb, 32]
    nll_sum = nll.sum(dim=(0, 1))  # f32[] partial(dp,mb)
    loss = nll_sum / count  # f32[] partial(dp,mb)
    saved = HeadSaved(
        x=x, labels=labels, count=count, norm_rstd=norm_rstd, norm_full=norm_full, logits=logits, nll_lse=nll_lse
    )
    return loss, saved


def head_backward(
    comm: Comm,
    p: HeadParams,
    g: HeadParams,
    grad_loss: Tensor,  # f32[]
    saved: HeadSaved,
) -> Tensor:
    grad_nll_sum = grad_loss / saved.count  # f32[]
    grad_nll = grad_nll_sum.reshape(1, 1).expand(2, 32)  # f32[16@dp,mb, 32]
    grad_logits = functional.cross_entropy_backward(
        grad_nll, saved.logits, saved.labels, saved.nll_lse, offset=comm.tp.rank * 128, num_classes=256
    )  # f32[16@dp,mb, 32, 256@tp]
    del saved.logits
    grad_norm_full = grad_logits @ p.head_weight  # f32[16@dp,mb, 32, 64] partial(tp)
    # reduce-scatter 8.0 KiB over tp, while what follows runs: each rank has a part of the sum in head and keeps its
    # share of dim 1
    grad_norm_work = comm.tp.start_reduce_scatter(grad_norm_full, dim=1)  # f32[16@dp,mb, 32@tp, 64]
    del grad_norm_full
    functional.linear_add_grad_weight(g.head_weight, grad_logits, saved.norm_full)  # f32[256@tp, 64] partial(dp,mb)
    del grad_logits
    grad_norm = grad_norm_work.wait()  # f32[16@dp,mb, 32@tp, 64]
    # grad_x: f32[16@dp,mb, 32@tp, 64], grad_norm_weight: f32[64] partial(dp,mb,tp)
    grad_x, grad_norm_weight = functional.rms_norm_backward(grad_norm, saved.x, (64,), p.norm_weight, saved.norm_rstd)
    g.norm_weight.add_(grad_norm_weight)
    return grad_x
