"""Region head.

Emitted by partc from model.py for pp=1,dp=2,tp=2. Comments give the whole tensor's type:

    f32[16@dp,mb, 64]  each rank has its part of the 16 rows: dp cuts them, and mb, the microbatches, once more
    partial(tp)        each rank of tp has a contribution, which is still to be combined with the others
    vary(tp)           equal on the ranks of tp, which use it differently: its gradient is their sum
"""

from dataclasses import dataclass
from typing import NamedTuple

import kernels
import torch
from runtime.comm.comm import Comm
from runtime.ops import functional
from torch import Tensor
from torch.nn import functional as F


class HeadParams(NamedTuple):
    norm_weight: Tensor  # bf16[64] vary(dp,tp)
    head_weight: Tensor  # bf16[256@tp, 64] vary(dp)


@dataclass(slots=True)
class HeadSaved:
    """Tensors that forward keeps for backward, which deletes the large ones after their last use."""

    x: Tensor  # bf16[16@dp, 32@tp, 64]
    labels: Tensor  # i64[16@dp, 32]
    count: Tensor  # f32[] vary(dp)
    norm_rstd: Tensor  # f32[16@dp, 32@tp, 1]
    norm_full: Tensor  # bf16[16@dp, 32, 64] vary(tp)
    logits: Tensor  # bf16[16@dp, 32, 256@tp]
    nll_lse: Tensor  # f32[16@dp, 32]


def head_forward(
    comm: Comm,
    p: HeadParams,
    x: Tensor,  # bf16[16@dp, 32@tp, 64]
    labels: Tensor,  # i64[16@dp, 32]
    count: Tensor,  # f32[] vary(dp)
) -> tuple[Tensor, HeadSaved]:
    """head (gpt.py:109)."""
    # norm: bf16[16@dp, 32@tp, 64], norm_rstd: f32[16@dp, 32@tp, 1]
    norm, norm_rstd = kernels.rms_norm(x, p.norm_weight)
    # all-gather 16.0 KiB over tp: head needs all of dim 1
    norm_full = comm.tp.all_gather(norm, dim=1)  # bf16[16@dp, 32, 64] vary(tp)
    del norm
    logits = F.linear(norm_full, p.head_weight)  # bf16[16@dp, 32, 256@tp]
    nll_max_partial, nll_picked_partial, nll_sums_partial_own = kernels.cross_entropy(
        logits, labels, comm.tp.rank
    )  # each f32[16@dp, 32] partial(tp)
    # all-reduce 1.0 KiB over tp: the largest of every rank's, for gpt.py:131
    nll_max = comm.tp.all_reduce(nll_max_partial, "max")  # f32[16@dp, 32]
    nll_sums_partial = kernels.sub_exp_mul(nll_max_partial, nll_max, nll_sums_partial_own)  # f32[16@dp, 32] partial(tp)
    nll_sums_and_nll_picked_partial = torch.cat(
        (nll_sums_partial, nll_picked_partial)
    )  # f32[2 · 16@dp, 32] partial(tp)
    # all-reduce 2.0 KiB over tp: each rank has a part of the sum in gpt.py:131
    nll_sums_and_nll_picked = comm.tp.all_reduce_(nll_sums_and_nll_picked_partial)  # f32[2 · 16@dp, 32]
    nll_sums, nll_picked = nll_sums_and_nll_picked.split((8, 8))  # each f32[16@dp, 32]
    nll_lse, nll = kernels.log_sum_exp_cross_entropy_rows(nll_max, nll_sums, nll_picked, labels)  # each f32[16@dp, 32]
    nll_sum = nll.sum(dim=(0, 1))  # f32[] partial(dp)
    loss = nll_sum / count  # f32[] partial(dp)
    saved = HeadSaved(
        x=x, labels=labels, count=count, norm_rstd=norm_rstd, norm_full=norm_full, logits=logits, nll_lse=nll_lse
    )
    return loss, saved


def head_backward(
    comm: Comm,
    p: HeadParams,
    grad_loss: Tensor,  # f32[]
    saved: HeadSaved,
) -> tuple[Tensor, HeadParams]:
    grad_nll_sum = grad_loss / saved.count  # f32[]
    # written over saved.logits
    grad_logits = kernels.cross_entropy_backward(
        grad_nll_sum, saved.logits, saved.labels, saved.nll_lse, comm.tp.rank
    )  # bf16[16@dp, 32, 256@tp]
    del saved.logits
    grad_norm_full = grad_logits @ p.head_weight  # bf16[16@dp, 32, 64] partial(tp)
    # reduce-scatter 16.0 KiB over tp, while what follows runs: each rank has a part of the sum in head and keeps its
    # share of dim 1
    grad_norm_work = comm.tp.start_reduce_scatter(grad_norm_full, dim=1)  # bf16[16@dp, 32@tp, 64]
    grad_head_weight = functional.linear_grad_weight(grad_logits, saved.norm_full)  # bf16[256@tp, 64] partial(dp)
    grad_norm = grad_norm_work.wait()  # bf16[16@dp, 32@tp, 64]
    # grad_x: bf16[16@dp, 32@tp, 64], grad_norm_weight: bf16[64] partial(dp,tp)
    grad_x, grad_norm_weight = kernels.rms_norm_backward(saved.x, saved.norm_rstd, grad_norm, p.norm_weight)
    g = HeadParams(norm_weight=grad_norm_weight, head_weight=grad_head_weight)
    return grad_x, g
