"""Region block.

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


class BlockParams(NamedTuple):
    norm1_weight: Tensor  # f32[64] vary(dp,mb,tp)
    attn_wq_weight: Tensor  # f32[64@tp, 64] vary(dp,mb)
    attn_wk_weight: Tensor  # f32[32@tp, 64] vary(dp,mb)
    attn_wv_weight: Tensor  # f32[32@tp, 64] vary(dp,mb)
    attn_wo_weight: Tensor  # f32[64, 64@tp] vary(dp,mb)
    norm2_weight: Tensor  # f32[64] vary(dp,mb,tp)
    mlp_gate_weight: Tensor  # f32[176@tp, 64] vary(dp,mb)
    mlp_up_weight: Tensor  # f32[176@tp, 64] vary(dp,mb)
    mlp_down_weight: Tensor  # f32[64, 176@tp] vary(dp,mb)


@dataclass(slots=True)
class BlockSaved:
    """Tensors that forward keeps for backward, which deletes the large ones after their last use."""

    x: Tensor  # f32[16@dp,mb, 32@tp, 64]
    cos: Tensor  # f32[32, 16]
    sin: Tensor  # f32[32, 16]
    norm1_rstd: Tensor  # f32[16@dp,mb, 32@tp, 1]
    norm1_full: Tensor  # f32[32, 16@dp,mb, 64] vary(tp)
    attn_v: Tensor  # f32[16@dp,mb, 2@tp, 32, 16]
    attn_q_2: Tensor  # f32[16@dp,mb, 4@tp, 32, 16]
    attn_k_2: Tensor  # f32[16@dp,mb, 2@tp, 32, 16]
    attn_heads: Tensor  # f32[16@dp,mb, 4@tp, 32, 16]
    attn_heads_lse: Tensor  # f32[16@dp,mb, 4@tp, 32]
    attn_merged: Tensor  # f32[32, 16@dp,mb, 64@tp]
    x_2: Tensor  # f32[16@dp,mb, 32@tp, 64]
    norm2_rstd: Tensor  # f32[16@dp,mb, 32@tp, 1]
    norm2_full: Tensor  # f32[32, 16@dp,mb, 64] vary(tp)
    mlp_gate: Tensor  # f32[32, 16@dp,mb, 176@tp]
    mlp_silu: Tensor  # f32[32, 16@dp,mb, 176@tp]
    mlp_up: Tensor  # f32[32, 16@dp,mb, 176@tp]
    mlp_hidden: Tensor  # f32[32, 16@dp,mb, 176@tp]


def block_forward(
    comm: Comm,
    p: BlockParams,
    x: Tensor,  # f32[16@dp,mb, 32@tp, 64]
    cos: Tensor,  # f32[32, 16]
    sin: Tensor,  # f32[32, 16]
) -> tuple[Tensor, BlockSaved]:
    """blocks.0 to blocks.3 (gpt.py:58)."""
    # norm1: f32[16@dp,mb, 32@tp, 64], norm1_rstd: f32[16@dp,mb, 32@tp, 1]
    norm1, norm1_rstd = functional.rms_norm(x, (64,), p.norm1_weight, 1e-05)
    norm1_t = norm1.transpose(0, 1)  # f32[32@tp, 16@dp,mb, 64]
    # all-gather 8.0 KiB over tp: attn.wq, attn.wk and attn.wv need all of dim 0
    norm1_full = comm.tp.all_gather(norm1_t, dim=0)  # f32[32, 16@dp,mb, 64] vary(tp)
    del norm1, norm1_t
    attn_q = (
        F.linear(norm1_full, p.attn_wq_weight).reshape(32, 2, 2, 16).permute(1, 2, 0, 3)
    )  # f32[16@dp,mb, 4@tp, 32, 16]
    attn_k = (
        F.linear(norm1_full, p.attn_wk_weight).reshape(32, 2, 1, 16).permute(1, 2, 0, 3)
    )  # f32[16@dp,mb, 2@tp, 32, 16]
    attn_v = (
        F.linear(norm1_full, p.attn_wv_weight).reshape(32, 2, 1, 16).permute(1, 2, 0, 3)
    )  # f32[16@dp,mb, 2@tp, 32, 16]
    attn_q_2 = functional.rotary(attn_q, cos, sin)  # f32[16@dp,mb, 4@tp, 32, 16]
    del attn_q
    attn_k_2 = functional.rotary(attn_k, cos, sin)  # f32[16@dp,mb, 2@tp, 32, 16]
    # attn_heads: f32[16@dp,mb, 4@tp, 32, 16], attn_heads_lse: f32[16@dp,mb, 4@tp, 32]
    attn_heads, attn_heads_lse = functional.attention(attn_q_2, attn_k_2, attn_v, is_causal=True)
    attn_merged = attn_heads.permute(2, 0, 1, 3).reshape(32, 2, 32)  # f32[32, 16@dp,mb, 64@tp]
    attn_wo_partial = F.linear(attn_merged, p.attn_wo_weight)  # f32[32, 16@dp,mb, 64] partial(tp)
    # reduce-scatter 8.0 KiB over tp: each rank has a part of the sum in attn.wo and keeps its share of dim 0
    attn_wo_t = comm.tp.reduce_scatter(attn_wo_partial, dim=0)  # f32[32@tp, 16@dp,mb, 64]
    del attn_wo_partial
    attn_wo = attn_wo_t.transpose(0, 1)  # f32[16@dp,mb, 32@tp, 64]
    x_2 = x + attn_wo  # f32[16@dp,mb, 32@tp, 64]
    del attn_wo_t, attn_wo
    # norm2: f32[16@dp,mb, 32@tp, 64], norm2_rstd: f32[16@dp,mb, 32@tp, 1]
    norm2, norm2_rstd = functional.rms_norm(x_2, (64,), p.norm2_weight, 1e-05)
    norm2_t = norm2.transpose(0, 1)  # f32[32@tp, 16@dp,mb, 64]
    # all-gather 8.0 KiB over tp: mlp.gate and mlp.up need all of dim 0
    norm2_full = comm.tp.all_gather(norm2_t, dim=0)  # f32[32, 16@dp,mb, 64] vary(tp)
    mlp_gate = F.linear(norm2_full, p.mlp_gate_weight)  # f32[32, 16@dp,mb, 176@tp]
    mlp_silu = F.silu(mlp_gate)  # f32[32, 16@dp,mb, 176@tp]
    mlp_up = F.linear(norm2_full, p.mlp_up_weight)  # f32[32, 16@dp,mb, 176@tp]
    mlp_hidden = mlp_silu * mlp_up  # f32[32, 16@dp,mb, 176@tp]
    mlp_down_partial = F.linear(mlp_hidden, p.mlp_down_weight)  # f32[32, 16@dp,mb, 64] partial(tp)
    # reduce-scatter 8.0 KiB over tp: each rank has a part of the sum in mlp.down and keeps its share of dim 0
    mlp_down_t = comm.tp.reduce_scatter(mlp_down_partial, dim=0)  # f32[32@tp, 16@dp,mb, 64]
    del mlp_down_partial
    mlp_down = mlp_down_t.transpose(0, 1)  # f32[16@dp,mb, 32@tp, 64]
    y = x_2 + mlp_down  # f32[16@dp,mb, 32@tp, 64]
    saved = BlockSaved(
        x=x,
        cos=cos,
        sin=sin,
        norm1_rstd=norm1_rstd,
        norm1_full=norm1_full,
        attn_v=attn_v,
        attn_q_2=attn_q_2,
        attn_k_2=attn_k_2,
        attn_heads=attn_heads,
        attn_heads_lse=attn_heads_lse,
        attn_merged=attn_merged,
        x_2=x_2,
        norm2_rstd=norm2_rstd,
        norm2_full=norm2_full,
        mlp_gate=mlp_gate,
        mlp_silu=mlp_silu,
        mlp_up=mlp_up,
        mlp_hidden=mlp_hidden,
    )
    return y, saved


def block_backward(
    comm: Comm,
    p: BlockParams,
    g: BlockParams,
    grad_y: Tensor,  # f32[16@dp,mb, 32@tp, 64]
    saved: BlockSaved,
) -> Tensor:
    grad_mlp_down_t = grad_y.transpose(0, 1)  # f32[32@tp, 16@dp,mb, 64]
    # all-gather 8.0 KiB over tp: mlp and mlp.down need all of dim 0
    grad_mlp_down_full = comm.tp.all_gather(grad_mlp_down_t, dim=0)  # f32[32, 16@dp,mb, 64]
    grad_mlp_hidden = grad_mlp_down_full @ p.mlp_down_weight  # f32[32, 16@dp,mb, 176@tp]
    grad_mlp_up = grad_mlp_hidden * saved.mlp_silu  # f32[32, 16@dp,mb, 176@tp]
    del saved.mlp_silu
    grad_mlp_silu = grad_mlp_hidden * saved.mlp_up  # f32[32, 16@dp,mb, 176@tp]
    del saved.mlp_up, grad_mlp_hidden
    grad_norm2_full_1 = grad_mlp_up @ p.mlp_up_weight  # f32[32, 16@dp,mb, 64] partial(tp)
    grad_mlp_gate = torch.ops.aten.silu_backward.default(grad_mlp_silu, saved.mlp_gate)  # f32[32, 16@dp,mb, 176@tp]
    del saved.mlp_gate, grad_mlp_silu
    grad_norm2_full_2 = grad_mlp_gate @ p.mlp_gate_weight  # f32[32, 16@dp,mb, 64] partial(tp)
    grad_norm2_full = grad_norm2_full_1 + grad_norm2_full_2  # f32[32, 16@dp,mb, 64] partial(tp)
    del grad_norm2_full_1, grad_norm2_full_2
    # reduce-scatter 8.0 KiB over tp, while what follows runs: each rank has a part of the sum in mlp.gate and keeps its
    # share of dim 0
    grad_norm2_t_work = comm.tp.start_reduce_scatter(grad_norm2_full, dim=0)  # f32[32@tp, 16@dp,mb, 64]
    del grad_norm2_full
    functional.linear_add_grad_weight(
        g.mlp_down_weight, grad_mlp_down_full, saved.mlp_hidden
    )  # f32[64, 176@tp] partial(dp,mb)
    del saved.mlp_hidden, grad_mlp_down_full
    functional.linear_add_grad_weight(g.mlp_up_weight, grad_mlp_up, saved.norm2_full)  # f32[176@tp, 64] partial(dp,mb)
    del grad_mlp_up
    functional.linear_add_grad_weight(
        g.mlp_gate_weight, grad_mlp_gate, saved.norm2_full
    )  # f32[176@tp, 64] partial(dp,mb)
    del saved.norm2_full, grad_mlp_gate
    grad_norm2 = grad_norm2_t_work.wait().transpose(0, 1)  # f32[16@dp,mb, 32@tp, 64]
    # grad_x_2_1: f32[16@dp,mb, 32@tp, 64], grad_norm2_weight: f32[64] partial(dp,mb,tp)
    grad_x_2_1, grad_norm2_weight = functional.rms_norm_backward(
        grad_norm2, saved.x_2, (64,), p.norm2_weight, saved.norm2_rstd
    )
    g.norm2_weight.add_(grad_norm2_weight)
    grad_x_2 = grad_y + grad_x_2_1  # f32[16@dp,mb, 32@tp, 64]
    grad_attn_wo_t = grad_x_2.transpose(0, 1)  # f32[32@tp, 16@dp,mb, 64]
    # all-gather 8.0 KiB over tp: attn and attn.wo need all of dim 0
    grad_attn_wo_full = comm.tp.all_gather(grad_attn_wo_t, dim=0)  # f32[32, 16@dp,mb, 64]
    grad_attn_merged = grad_attn_wo_full @ p.attn_wo_weight  # f32[32, 16@dp,mb, 64@tp]
    grad_attn_heads = grad_attn_merged.reshape(32, 2, 2, 16).permute(1, 2, 0, 3)  # f32[16@dp,mb, 4@tp, 32, 16]
    # grad_attn_q_2: f32[16@dp,mb, 4@tp, 32, 16], grad_attn_k_2: f32[16@dp,mb, 2@tp, 32, 16], grad_attn_v: f32[16@dp,mb,
    # 2@tp, 32, 16]
    grad_attn_q_2, grad_attn_k_2, grad_attn_v = functional.attention_backward(
        grad_attn_heads,
        saved.attn_q_2,
        saved.attn_k_2,
        saved.attn_v,
        mask=None,
        out=saved.attn_heads,
        lse=saved.attn_heads_lse,
        is_causal=True,
    )
    grad_attn_wk = (
        functional.rotary_backward(grad_attn_k_2, saved.cos, saved.sin).permute(2, 0, 1, 3).reshape(32, 2, 16)
    )  # f32[32, 16@dp,mb, 32@tp]
    grad_attn_wq = (
        functional.rotary_backward(grad_attn_q_2, saved.cos, saved.sin).permute(2, 0, 1, 3).reshape(32, 2, 32)
    )  # f32[32, 16@dp,mb, 64@tp]
    grad_attn_wv = grad_attn_v.permute(2, 0, 1, 3).reshape(32, 2, 16)  # f32[32, 16@dp,mb, 32@tp]
    grad_norm1_full_1 = grad_attn_wv @ p.attn_wv_weight  # f32[32, 16@dp,mb, 64] partial(tp)
    grad_norm1_full_2 = grad_attn_wk @ p.attn_wk_weight  # f32[32, 16@dp,mb, 64] partial(tp)
    grad_norm1_full_3 = grad_norm1_full_1 + grad_norm1_full_2  # f32[32, 16@dp,mb, 64] partial(tp)
    grad_norm1_full_4 = grad_attn_wq @ p.attn_wq_weight  # f32[32, 16@dp,mb, 64] partial(tp)
    grad_norm1_full = grad_norm1_full_3 + grad_norm1_full_4  # f32[32, 16@dp,mb, 64] partial(tp)
    # reduce-scatter 8.0 KiB over tp, while what follows runs: each rank has a part of the sum in attn.wq and keeps its
    # share of dim 0
    grad_norm1_t_work = comm.tp.start_reduce_scatter(grad_norm1_full, dim=0)  # f32[32@tp, 16@dp,mb, 64]
    functional.linear_add_grad_weight(
        g.attn_wo_weight, grad_attn_wo_full, saved.attn_merged
    )  # f32[64, 64@tp] partial(dp,mb)
    del grad_attn_wo_full
    functional.linear_add_grad_weight(g.attn_wv_weight, grad_attn_wv, saved.norm1_full)  # f32[32@tp, 64] partial(dp,mb)
    functional.linear_add_grad_weight(g.attn_wk_weight, grad_attn_wk, saved.norm1_full)  # f32[32@tp, 64] partial(dp,mb)
    functional.linear_add_grad_weight(g.attn_wq_weight, grad_attn_wq, saved.norm1_full)  # f32[64@tp, 64] partial(dp,mb)
    del saved.norm1_full
    grad_norm1 = grad_norm1_t_work.wait().transpose(0, 1)  # f32[16@dp,mb, 32@tp, 64]
    # grad_x_1: f32[16@dp,mb, 32@tp, 64], grad_norm1_weight: f32[64] partial(dp,mb,tp)
    grad_x_1, grad_norm1_weight = functional.rms_norm_backward(
        grad_norm1, saved.x, (64,), p.norm1_weight, saved.norm1_rstd
    )
    g.norm1_weight.add_(grad_norm1_weight)
    grad_x = grad_x_2 + grad_x_1  # f32[16@dp,mb, 32@tp, 64]
    return grad_x
