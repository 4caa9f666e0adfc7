"""Region block.

Emitted by partc from model.py for pp=1,dp=2,tp=2. Comments give the whole tensor's type:

    f32[16@dp,mb, 64]  each rank has its part of the 16 rows: dp cuts them, and mb, the microbatches, once more
    partial(tp)        each rank of tp has a contribution, which is still to be combined with the others
    vary(tp)           equal on the ranks of tp, which use it differently: its gradient is their sum
"""

from dataclasses import dataclass
from typing import NamedTuple

import kernels
from runtime.comm.comm import Comm
from runtime.ops import functional
from torch import Tensor
from torch.nn import functional as F


class BlockParams(NamedTuple):
    norm1_weight: Tensor  # bf16[64] vary(dp,tp)
    attn_wq_weight: Tensor  # bf16[64@tp, 64] vary(dp)
    attn_wk_weight: Tensor  # bf16[32@tp, 64] vary(dp)
    attn_wv_weight: Tensor  # bf16[32@tp, 64] vary(dp)
    attn_wo_weight: Tensor  # bf16[64, 64@tp] vary(dp)
    norm2_weight: Tensor  # bf16[64] vary(dp,tp)
    mlp_gate_weight: Tensor  # bf16[176@tp, 64] vary(dp)
    mlp_up_weight: Tensor  # bf16[176@tp, 64] vary(dp)
    mlp_down_weight: Tensor  # bf16[64, 176@tp] vary(dp)


@dataclass(slots=True)
class BlockSaved:
    """Tensors that forward keeps for backward, which deletes the large ones after their last use."""

    x: Tensor  # bf16[16@dp, 32@tp, 64]
    cos: Tensor  # f32[32, 16]
    sin: Tensor  # f32[32, 16]
    norm1_rstd: Tensor  # f32[16@dp, 32@tp, 1]
    norm1_full: Tensor  # bf16[32, 16@dp, 64] vary(tp)
    attn_v: Tensor  # bf16[16@dp, 2@tp, 32, 16]
    attn_q_2_bf16: Tensor  # bf16[16@dp, 4@tp, 32, 16]
    attn_k_2_bf16: Tensor  # bf16[16@dp, 2@tp, 32, 16]
    attn_heads: Tensor  # bf16[16@dp, 4@tp, 32, 16]
    attn_heads_lse: Tensor  # f32[16@dp, 4@tp, 32]
    x_2: Tensor  # bf16[16@dp, 32@tp, 64]
    norm2_rstd: Tensor  # f32[16@dp, 32@tp, 1]
    norm2_full: Tensor  # bf16[32, 16@dp, 64] vary(tp)
    mlp_gate: Tensor  # bf16[32, 16@dp, 176@tp]
    mlp_up: Tensor  # bf16[32, 16@dp, 176@tp]


def block_forward(
    comm: Comm,
    p: BlockParams,
    x: Tensor,  # bf16[16@dp, 32@tp, 64]
    cos: Tensor,  # f32[32, 16]
    sin: Tensor,  # f32[32, 16]
) -> tuple[Tensor, BlockSaved]:
    """blocks.0 to blocks.3 (gpt.py:58)."""
    # norm1: bf16[16@dp, 32@tp, 64], norm1_rstd: f32[16@dp, 32@tp, 1]
    norm1, norm1_rstd = kernels.rms_norm(x, p.norm1_weight)
    norm1_t = norm1.transpose(0, 1)  # bf16[32@tp, 16@dp, 64]
    # all-gather 16.0 KiB over tp: attn.wq, attn.wk and attn.wv need all of dim 0
    norm1_full = comm.tp.all_gather(norm1_t, dim=0)  # bf16[32, 16@dp, 64] vary(tp)
    del norm1, norm1_t
    attn_wq = F.linear(norm1_full, p.attn_wq_weight)  # bf16[32, 16@dp, 64@tp]
    attn_wk = F.linear(norm1_full, p.attn_wk_weight)  # bf16[32, 16@dp, 32@tp]
    attn_v = (
        F.linear(norm1_full, p.attn_wv_weight).reshape(32, 8, 1, 16).permute(1, 2, 0, 3)
    )  # bf16[16@dp, 2@tp, 32, 16]
    attn_q_2_bf16 = kernels.rotary(attn_wq, cos, sin)  # bf16[16@dp, 4@tp, 32, 16]
    del attn_wq
    attn_k_2_bf16 = kernels.rotary_2(attn_wk, cos, sin)  # bf16[16@dp, 2@tp, 32, 16]
    # attn_heads: bf16[16@dp, 4@tp, 32, 16], attn_heads_lse: f32[16@dp, 4@tp, 32]
    attn_heads, attn_heads_lse = functional.attention(attn_q_2_bf16, attn_k_2_bf16, attn_v, is_causal=True)
    attn_merged = attn_heads.permute(2, 0, 1, 3).reshape(32, 8, 32)  # bf16[32, 16@dp, 64@tp]
    attn_wo_partial = F.linear(attn_merged, p.attn_wo_weight)  # bf16[32, 16@dp, 64] partial(tp)
    # reduce-scatter 16.0 KiB over tp: each rank has a part of the sum in attn.wo and keeps its share of dim 0
    attn_wo_t = comm.tp.reduce_scatter(attn_wo_partial, dim=0)  # bf16[32@tp, 16@dp, 64]
    del attn_wo_partial
    # x_2: bf16[16@dp, 32@tp, 64], norm2: bf16[16@dp, 32@tp, 64], norm2_rstd: f32[16@dp, 32@tp, 1]
    x_2, norm2, norm2_rstd = kernels.add_rms_norm(attn_wo_t, x, p.norm2_weight)
    del attn_wo_t
    norm2_t = norm2.transpose(0, 1)  # bf16[32@tp, 16@dp, 64]
    # all-gather 16.0 KiB over tp: mlp.gate and mlp.up need all of dim 0
    norm2_full = comm.tp.all_gather(norm2_t, dim=0)  # bf16[32, 16@dp, 64] vary(tp)
    mlp_gate = F.linear(norm2_full, p.mlp_gate_weight)  # bf16[32, 16@dp, 176@tp]
    mlp_up = F.linear(norm2_full, p.mlp_up_weight)  # bf16[32, 16@dp, 176@tp]
    mlp_hidden = kernels.silu_mul(mlp_gate, mlp_up)  # bf16[32, 16@dp, 176@tp]
    mlp_down_partial = F.linear(mlp_hidden, p.mlp_down_weight)  # bf16[32, 16@dp, 64] partial(tp)
    del mlp_hidden
    # reduce-scatter 16.0 KiB over tp: each rank has a part of the sum in mlp.down and keeps its share of dim 0
    mlp_down_t = comm.tp.reduce_scatter(mlp_down_partial, dim=0)  # bf16[32@tp, 16@dp, 64]
    mlp_down = mlp_down_t.transpose(0, 1)  # bf16[16@dp, 32@tp, 64]
    y = x_2 + mlp_down  # bf16[16@dp, 32@tp, 64]
    saved = BlockSaved(
        x=x,
        cos=cos,
        sin=sin,
        norm1_rstd=norm1_rstd,
        norm1_full=norm1_full,
        attn_v=attn_v,
        attn_q_2_bf16=attn_q_2_bf16,
        attn_k_2_bf16=attn_k_2_bf16,
        attn_heads=attn_heads,
        attn_heads_lse=attn_heads_lse,
        x_2=x_2,
        norm2_rstd=norm2_rstd,
        norm2_full=norm2_full,
        mlp_gate=mlp_gate,
        mlp_up=mlp_up,
    )
    return y, saved


def block_backward(
    comm: Comm,
    p: BlockParams,
    grad_y: Tensor,  # bf16[16@dp, 32@tp, 64]
    saved: BlockSaved,
) -> tuple[Tensor, BlockParams]:
    grad_mlp_down_t = grad_y.transpose(0, 1)  # bf16[32@tp, 16@dp, 64]
    # all-gather 16.0 KiB over tp: mlp and mlp.down need all of dim 0
    grad_mlp_down_full = comm.tp.all_gather(grad_mlp_down_t, dim=0)  # bf16[32, 16@dp, 64]
    grad_mlp_hidden = grad_mlp_down_full @ p.mlp_down_weight  # bf16[32, 16@dp, 176@tp]
    # recomputed: 132.0 KiB that forward did not save
    mlp_hidden, grad_mlp_up, grad_mlp_gate = kernels.silu_mul_silu_backward(
        saved.mlp_gate, saved.mlp_up, grad_mlp_hidden
    )  # each bf16[32, 16@dp, 176@tp]
    del saved.mlp_gate, saved.mlp_up, grad_mlp_hidden
    grad_norm2_full_1 = grad_mlp_up @ p.mlp_up_weight  # bf16[32, 16@dp, 64] partial(tp)
    grad_norm2_full_2 = grad_mlp_gate @ p.mlp_gate_weight  # bf16[32, 16@dp, 64] partial(tp)
    grad_norm2_full = grad_norm2_full_1 + grad_norm2_full_2  # bf16[32, 16@dp, 64] partial(tp)
    del grad_norm2_full_1, grad_norm2_full_2
    # reduce-scatter 16.0 KiB over tp, while what follows runs: each rank has a part of the sum in mlp.gate and keeps
    # its share of dim 0
    grad_norm2_t_work = comm.tp.start_reduce_scatter(grad_norm2_full, dim=0)  # bf16[32@tp, 16@dp, 64]
    grad_mlp_down_weight = functional.linear_grad_weight(grad_mlp_down_full, mlp_hidden)  # bf16[64, 176@tp] partial(dp)
    del grad_mlp_down_full, mlp_hidden
    grad_mlp_up_weight = functional.linear_grad_weight(grad_mlp_up, saved.norm2_full)  # bf16[176@tp, 64] partial(dp)
    del grad_mlp_up
    grad_mlp_gate_weight = functional.linear_grad_weight(
        grad_mlp_gate, saved.norm2_full
    )  # bf16[176@tp, 64] partial(dp)
    del saved.norm2_full, grad_mlp_gate
    grad_norm2_t = grad_norm2_t_work.wait()  # bf16[32@tp, 16@dp, 64]
    # grad_norm2_weight: bf16[64] partial(dp,tp), grad_x_2: bf16[16@dp, 32@tp, 64]
    grad_norm2_weight, grad_x_2 = kernels.rms_norm_backward_add(
        grad_norm2_t, saved.x_2, saved.norm2_rstd, p.norm2_weight, grad_y
    )
    grad_attn_wo_t = grad_x_2.transpose(0, 1)  # bf16[32@tp, 16@dp, 64]
    # all-gather 16.0 KiB over tp: attn and attn.wo need all of dim 0
    grad_attn_wo_full = comm.tp.all_gather(grad_attn_wo_t, dim=0)  # bf16[32, 16@dp, 64]
    grad_attn_merged = grad_attn_wo_full @ p.attn_wo_weight  # bf16[32, 16@dp, 64@tp]
    grad_attn_heads = grad_attn_merged.reshape(32, 8, 2, 16).permute(1, 2, 0, 3)  # bf16[16@dp, 4@tp, 32, 16]
    attn_merged = saved.attn_heads.permute(2, 0, 1, 3).reshape(32, 8, 32)  # bf16[32, 16@dp, 64@tp]
    # grad_attn_q_2_bf16: bf16[16@dp, 4@tp, 32, 16], grad_attn_k_2_bf16: bf16[16@dp, 2@tp, 32, 16], grad_attn_v:
    # bf16[16@dp, 2@tp, 32, 16]
    grad_attn_q_2_bf16, grad_attn_k_2_bf16, grad_attn_v = functional.attention_backward(
        grad_attn_heads,
        saved.attn_q_2_bf16,
        saved.attn_k_2_bf16,
        saved.attn_v,
        mask=None,
        out=saved.attn_heads,
        lse=saved.attn_heads_lse,
        is_causal=True,
    )
    grad_attn_wk = kernels.rotary_backward(grad_attn_k_2_bf16, saved.sin, saved.cos)  # bf16[32, 16@dp, 32@tp]
    grad_attn_wq = kernels.rotary_backward_2(grad_attn_q_2_bf16, saved.sin, saved.cos)  # bf16[32, 16@dp, 64@tp]
    grad_attn_wv = grad_attn_v.permute(2, 0, 1, 3).reshape(32, 8, 16)  # bf16[32, 16@dp, 32@tp]
    grad_norm1_full_1 = grad_attn_wv @ p.attn_wv_weight  # bf16[32, 16@dp, 64] partial(tp)
    grad_norm1_full_2 = grad_attn_wk @ p.attn_wk_weight  # bf16[32, 16@dp, 64] partial(tp)
    grad_norm1_full_4 = grad_attn_wq @ p.attn_wq_weight  # bf16[32, 16@dp, 64] partial(tp)
    grad_norm1_full = kernels.add(
        grad_norm1_full_1, grad_norm1_full_2, grad_norm1_full_4
    )  # bf16[32, 16@dp, 64] partial(tp)
    # reduce-scatter 16.0 KiB over tp, while what follows runs: each rank has a part of the sum in attn.wq and keeps its
    # share of dim 0
    grad_norm1_t_work = comm.tp.start_reduce_scatter(grad_norm1_full, dim=0)  # bf16[32@tp, 16@dp, 64]
    grad_attn_wo_weight = functional.linear_grad_weight(grad_attn_wo_full, attn_merged)  # bf16[64, 64@tp] partial(dp)
    grad_attn_wv_weight = functional.linear_grad_weight(grad_attn_wv, saved.norm1_full)  # bf16[32@tp, 64] partial(dp)
    grad_attn_wk_weight = functional.linear_grad_weight(grad_attn_wk, saved.norm1_full)  # bf16[32@tp, 64] partial(dp)
    grad_attn_wq_weight = functional.linear_grad_weight(grad_attn_wq, saved.norm1_full)  # bf16[64@tp, 64] partial(dp)
    del saved.norm1_full
    grad_norm1_t = grad_norm1_t_work.wait()  # bf16[32@tp, 16@dp, 64]
    # grad_norm1_weight: bf16[64] partial(dp,tp), grad_x: bf16[16@dp, 32@tp, 64]
    grad_norm1_weight, grad_x = kernels.rms_norm_backward_add(
        grad_norm1_t, saved.x, saved.norm1_rstd, p.norm1_weight, grad_x_2
    )
    g = BlockParams(
        norm1_weight=grad_norm1_weight,
        attn_wq_weight=grad_attn_wq_weight,
        attn_wk_weight=grad_attn_wk_weight,
        attn_wv_weight=grad_attn_wv_weight,
        attn_wo_weight=grad_attn_wo_weight,
        norm2_weight=grad_norm2_weight,
        mlp_gate_weight=grad_mlp_gate_weight,
        mlp_up_weight=grad_mlp_up_weight,
        mlp_down_weight=grad_mlp_down_weight,
    )
    return grad_x, g
