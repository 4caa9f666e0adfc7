"""Stage 0 of 2: embed and blocks.0 to blocks.1.

Emitted by partc from model.py for pp=2,dp=2,tp=2. Comments give each tensor's whole shape and, after @, the axes that
cut it.
"""

from typing import NamedTuple

import torch
from runtime import functional
from runtime.comm import Comm
from runtime.layout import Received, Shard
from runtime.sums import Bucket, Sums
from torch import Tensor
from torch.nn import functional as F

Saved = tuple[Tensor, ...]  # what a forward function keeps for its backward
Values = dict[str, Tensor]


def rotary(
    comm: Comm,
) -> tuple[Tensor, Tensor]:
    """A constant of the model (gpt.py:105)."""
    arange = torch.arange(0, 16, 2, device=comm.device)  # i64[8]
    neg = -arange  # i64[8]
    neg_2 = neg.to(torch.float32)  # f32[8]
    div = neg_2 / 16  # f32[8]
    pow = 500000.0**div  # f32[8]
    arange_2 = torch.arange(32, device=comm.device)  # i64[32]
    cat = torch.cat((pow, pow))  # f32[16]
    outer = torch.outer(arange_2, cat)  # f32[32, 16]
    cos = outer.cos()  # f32[32, 16]
    sin = outer.sin()  # f32[32, 16]
    return cos, sin


class EmbedParams(NamedTuple):
    embed_weight: Tensor  # f32[256@tp, 64] vary(dp,mb)


def embed_forward(
    comm: Comm,
    p: EmbedParams,
    ids: Tensor,  # i64[16@dp,mb, 32]
) -> tuple[Tensor, Saved]:
    """embed (gpt.py:106)."""
    embed_partial = functional.embedding_shard(p.embed_weight, ids, comm.tp.rank)  # f32[16@dp,mb, 32, 64] partial(tp)
    # reduce-scatter 8.0 KiB over tp: each rank has a part of the sum in embedding_shard and keeps its share of dim 1
    embed = comm.tp.reduce_scatter(embed_partial, dim=1)  # f32[16@dp,mb, 32@tp, 64]
    return embed, (ids,)


def embed_backward(
    comm: Comm,
    g: EmbedParams,
    grad_embed: Tensor,  # f32[16@dp,mb, 32@tp, 64]
    saved: Saved,
) -> None:
    (ids,) = saved
    # all-gather 8.0 KiB over tp: embedding_shard needs all of dim 1
    grad_embed_full = comm.tp.all_gather(grad_embed, dim=1)  # f32[16@dp,mb, 32, 64]
    functional.embedding_shard_add_grad(
        g.embed_weight, grad_embed_full, ids, comm.tp.rank
    )  # f32[256@tp, 64] partial(dp,mb)


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


def block_forward(
    comm: Comm,
    p: BlockParams,
    x: Tensor,  # f32[16@dp,mb, 32@tp, 64]
    cos: Tensor,  # f32[32, 16]
    sin: Tensor,  # f32[32, 16]
) -> tuple[Tensor, Saved]:
    """blocks.0 to blocks.1 (gpt.py:58)."""
    norm1, norm1_rstd = functional.rms_norm(x, (64,), p.norm1_weight, 1e-05)  # f32[16@dp,mb, 32@tp, 64]
    norm1_turned = norm1.transpose(0, 1)  # f32[32@tp, 16@dp,mb, 64]
    # all-gather 8.0 KiB over tp: attn.wq, attn.wk and attn.wv need all of dim 0
    norm1_full = comm.tp.all_gather(norm1_turned, dim=0)  # f32[32, 16@dp,mb, 64] vary(tp)
    del norm1, norm1_turned
    attn_q = (
        F.linear(norm1_full, p.attn_wq_weight).reshape(32, 2, 2, 16).permute(1, 2, 0, 3)
    )  # f32[16@dp,mb, 4@tp, 32, 16]
    attn_k = (
        F.linear(norm1_full, p.attn_wk_weight).reshape(32, 2, 1, 16).permute(1, 2, 0, 3)
    )  # f32[16@dp,mb, 2@tp, 32, 16]
    attn_v = (
        F.linear(norm1_full, p.attn_wv_weight).reshape(32, 2, 1, 16).permute(1, 2, 0, 3)
    )  # f32[16@dp,mb, 2@tp, 32, 16]
    attn_split_0, attn_split_1 = attn_q.split((8, 8), dim=3)  # f32[16@dp,mb, 4@tp, 32, 8]
    attn_neg = -attn_split_1  # f32[16@dp,mb, 4@tp, 32, 8]
    attn_cat = torch.cat((attn_neg, attn_split_0), dim=3)  # f32[16@dp,mb, 4@tp, 32, 16]
    attn_mul = attn_q * cos  # f32[16@dp,mb, 4@tp, 32, 16]
    del attn_q, attn_split_0, attn_split_1
    attn_mul_2 = attn_cat * sin  # f32[16@dp,mb, 4@tp, 32, 16]
    del attn_cat
    attn_q_2 = attn_mul + attn_mul_2  # f32[16@dp,mb, 4@tp, 32, 16]
    del attn_mul, attn_mul_2
    attn_split_0_2, attn_split_1_2 = attn_k.split((8, 8), dim=3)  # f32[16@dp,mb, 2@tp, 32, 8]
    attn_neg_2 = -attn_split_1_2  # f32[16@dp,mb, 2@tp, 32, 8]
    attn_cat_2 = torch.cat((attn_neg_2, attn_split_0_2), dim=3)  # f32[16@dp,mb, 2@tp, 32, 16]
    attn_mul_3 = attn_k * cos  # f32[16@dp,mb, 2@tp, 32, 16]
    del attn_k, attn_split_0_2, attn_split_1_2
    attn_mul_4 = attn_cat_2 * sin  # f32[16@dp,mb, 2@tp, 32, 16]
    attn_k_2 = attn_mul_3 + attn_mul_4  # f32[16@dp,mb, 2@tp, 32, 16]
    attn_heads, attn_heads_lse = functional.attention(
        attn_q_2, attn_k_2, attn_v, is_causal=True
    )  # f32[16@dp,mb, 4@tp, 32, 16]
    attn_merged = attn_heads.permute(2, 0, 1, 3).reshape(32, 2, 32)  # f32[32, 16@dp,mb, 64@tp]
    attn_wo_partial = F.linear(attn_merged, p.attn_wo_weight)  # f32[32, 16@dp,mb, 64] partial(tp)
    # reduce-scatter 8.0 KiB over tp: each rank has a part of the sum in attn.wo and keeps its share of dim 0
    attn_wo_turned = comm.tp.reduce_scatter(attn_wo_partial, dim=0)  # f32[32@tp, 16@dp,mb, 64]
    del attn_wo_partial
    attn_wo = attn_wo_turned.transpose(0, 1)  # f32[16@dp,mb, 32@tp, 64]
    x_2 = x + attn_wo  # f32[16@dp,mb, 32@tp, 64]
    del attn_wo_turned, attn_wo
    norm2, norm2_rstd = functional.rms_norm(x_2, (64,), p.norm2_weight, 1e-05)  # f32[16@dp,mb, 32@tp, 64]
    norm2_turned = norm2.transpose(0, 1)  # f32[32@tp, 16@dp,mb, 64]
    # all-gather 8.0 KiB over tp: mlp.gate and mlp.up need all of dim 0
    norm2_full = comm.tp.all_gather(norm2_turned, dim=0)  # f32[32, 16@dp,mb, 64] vary(tp)
    del norm2, norm2_turned
    mlp_gate = F.linear(norm2_full, p.mlp_gate_weight)  # f32[32, 16@dp,mb, 176@tp]
    mlp_silu = F.silu(mlp_gate)  # f32[32, 16@dp,mb, 176@tp]
    mlp_up = F.linear(norm2_full, p.mlp_up_weight)  # f32[32, 16@dp,mb, 176@tp]
    mlp_hidden = mlp_silu * mlp_up  # f32[32, 16@dp,mb, 176@tp]
    mlp_down_partial = F.linear(mlp_hidden, p.mlp_down_weight)  # f32[32, 16@dp,mb, 64] partial(tp)
    # reduce-scatter 8.0 KiB over tp: each rank has a part of the sum in mlp.down and keeps its share of dim 0
    mlp_down_turned = comm.tp.reduce_scatter(mlp_down_partial, dim=0)  # f32[32@tp, 16@dp,mb, 64]
    del mlp_down_partial
    mlp_down = mlp_down_turned.transpose(0, 1)  # f32[16@dp,mb, 32@tp, 64]
    y = x_2 + mlp_down  # f32[16@dp,mb, 32@tp, 64]
    saved = (
        mlp_hidden,
        mlp_silu,
        mlp_up,
        norm2_full,
        mlp_gate,
        x_2,
        norm2_rstd,
        attn_merged,
        attn_q_2,
        attn_k_2,
        attn_v,
        attn_heads,
        attn_heads_lse,
        sin,
        cos,
        norm1_full,
        x,
        norm1_rstd,
    )
    return y, saved


def block_backward(
    comm: Comm,
    p: BlockParams,
    g: BlockParams,
    grad_y: Tensor,  # f32[16@dp,mb, 32@tp, 64]
    saved: Saved,
) -> Tensor:
    (
        mlp_hidden,
        mlp_silu,
        mlp_up,
        norm2_full,
        mlp_gate,
        x_2,
        norm2_rstd,
        attn_merged,
        attn_q_2,
        attn_k_2,
        attn_v,
        attn_heads,
        attn_heads_lse,
        sin,
        cos,
        norm1_full,
        x,
        norm1_rstd,
    ) = saved
    del saved
    grad_mlp_down_turned = grad_y.transpose(0, 1)  # f32[32@tp, 16@dp,mb, 64]
    # all-gather 8.0 KiB over tp: mlp and mlp.down need all of dim 0
    grad_mlp_down_full = comm.tp.all_gather(grad_mlp_down_turned, dim=0)  # f32[32, 16@dp,mb, 64]
    grad_mlp_hidden = grad_mlp_down_full @ p.mlp_down_weight  # f32[32, 16@dp,mb, 176@tp]
    grad_mlp_up = grad_mlp_hidden * mlp_silu  # f32[32, 16@dp,mb, 176@tp]
    del mlp_silu
    grad_mlp_silu = grad_mlp_hidden * mlp_up  # f32[32, 16@dp,mb, 176@tp]
    del mlp_up, grad_mlp_hidden
    grad_norm2_full_1 = grad_mlp_up @ p.mlp_up_weight  # f32[32, 2, 64]
    grad_mlp_gate = torch.ops.aten.silu_backward(grad_mlp_silu, mlp_gate)  # f32[32, 16@dp,mb, 176@tp]
    del mlp_gate, grad_mlp_silu
    grad_norm2_full_2 = grad_mlp_gate @ p.mlp_gate_weight  # f32[32, 2, 64]
    grad_norm2_full = grad_norm2_full_1 + grad_norm2_full_2  # f32[32, 16@dp,mb, 64] partial(tp)
    del grad_norm2_full_1, grad_norm2_full_2
    # reduce-scatter 8.0 KiB over tp, while what follows runs: each rank has a part of the sum in mlp.gate and keeps its
    # share of dim 0
    grad_norm2_turned_coming = comm.tp.start_reduce_scatter(grad_norm2_full, dim=0)  # f32[32@tp, 16@dp,mb, 64]
    del grad_norm2_full
    functional.linear_add_grad_weight(
        g.mlp_down_weight, grad_mlp_down_full, mlp_hidden
    )  # f32[64, 176@tp] partial(dp,mb)
    del mlp_hidden, grad_mlp_down_full
    functional.linear_add_grad_weight(g.mlp_up_weight, grad_mlp_up, norm2_full)  # f32[176@tp, 64] partial(dp,mb)
    del grad_mlp_up
    functional.linear_add_grad_weight(g.mlp_gate_weight, grad_mlp_gate, norm2_full)  # f32[176@tp, 64] partial(dp,mb)
    del norm2_full, grad_mlp_gate
    grad_norm2 = grad_norm2_turned_coming.wait().transpose(0, 1)  # f32[16@dp,mb, 32@tp, 64]
    grad_x_2_1, grad_norm2_weight = functional.rms_norm_backward(
        grad_norm2, x_2, (64,), p.norm2_weight, norm2_rstd
    )  # f32[2, 16, 64]
    g.norm2_weight.add_(grad_norm2_weight)
    grad_x_2 = grad_y + grad_x_2_1  # f32[16@dp,mb, 32@tp, 64]
    grad_attn_wo_turned = grad_x_2.transpose(0, 1)  # f32[32@tp, 16@dp,mb, 64]
    # all-gather 8.0 KiB over tp: attn and attn.wo need all of dim 0
    grad_attn_wo_full = comm.tp.all_gather(grad_attn_wo_turned, dim=0)  # f32[32, 16@dp,mb, 64]
    grad_attn_merged = grad_attn_wo_full @ p.attn_wo_weight  # f32[32, 16@dp,mb, 64@tp]
    grad_attn_heads = grad_attn_merged.reshape(32, 2, 2, 16).permute(1, 2, 0, 3)  # f32[16@dp,mb, 4@tp, 32, 16]
    grad_attn_q_2, grad_attn_k_2, grad_attn_v = functional.attention_backward(
        grad_attn_heads, attn_q_2, attn_k_2, attn_v, mask=None, out=attn_heads, lse=attn_heads_lse, is_causal=True
    )  # f32[16@dp,mb, 4@tp, 32, 16]
    grad_attn_cat_2 = grad_attn_k_2 * sin  # f32[16@dp,mb, 2@tp, 32, 16]
    grad_attn_k_1 = grad_attn_k_2 * cos  # f32[2, 1, 32, 16]
    grad_attn_neg_2 = grad_attn_cat_2[:, :, :, :8]  # f32[16@dp,mb, 2@tp, 32, 8]
    grad_attn_split_0_2 = grad_attn_cat_2[:, :, :, 8:]  # f32[16@dp,mb, 2@tp, 32, 8]
    grad_attn_split_1_2 = -grad_attn_neg_2  # f32[16@dp,mb, 2@tp, 32, 8]
    grad_attn_k_3 = torch.cat((grad_attn_split_0_2, grad_attn_split_1_2), dim=3)  # f32[2, 1, 32, 16]
    grad_attn_k = grad_attn_k_1 + grad_attn_k_3  # f32[16@dp,mb, 2@tp, 32, 16]
    grad_attn_wk = grad_attn_k.permute(2, 0, 1, 3).reshape(32, 2, 16)  # f32[32, 16@dp,mb, 32@tp]
    grad_attn_cat = grad_attn_q_2 * sin  # f32[16@dp,mb, 4@tp, 32, 16]
    grad_attn_q_1 = grad_attn_q_2 * cos  # f32[2, 2, 32, 16]
    grad_attn_neg = grad_attn_cat[:, :, :, :8]  # f32[16@dp,mb, 4@tp, 32, 8]
    grad_attn_split_0 = grad_attn_cat[:, :, :, 8:]  # f32[16@dp,mb, 4@tp, 32, 8]
    grad_attn_split_1 = -grad_attn_neg  # f32[16@dp,mb, 4@tp, 32, 8]
    grad_attn_q_3 = torch.cat((grad_attn_split_0, grad_attn_split_1), dim=3)  # f32[2, 2, 32, 16]
    grad_attn_q = grad_attn_q_1 + grad_attn_q_3  # f32[16@dp,mb, 4@tp, 32, 16]
    grad_attn_wq = grad_attn_q.permute(2, 0, 1, 3).reshape(32, 2, 32)  # f32[32, 16@dp,mb, 64@tp]
    grad_attn_wv = grad_attn_v.permute(2, 0, 1, 3).reshape(32, 2, 16)  # f32[32, 16@dp,mb, 32@tp]
    grad_norm1_full_1 = grad_attn_wv @ p.attn_wv_weight  # f32[32, 2, 64]
    grad_norm1_full_2 = grad_attn_wk @ p.attn_wk_weight  # f32[32, 2, 64]
    grad_norm1_full_3 = grad_norm1_full_1 + grad_norm1_full_2  # f32[32, 2, 64]
    del grad_norm1_full_1, grad_norm1_full_2
    grad_norm1_full_4 = grad_attn_wq @ p.attn_wq_weight  # f32[32, 2, 64]
    grad_norm1_full = grad_norm1_full_3 + grad_norm1_full_4  # f32[32, 16@dp,mb, 64] partial(tp)
    # reduce-scatter 8.0 KiB over tp, while what follows runs: each rank has a part of the sum in attn.wq and keeps its
    # share of dim 0
    grad_norm1_turned_coming = comm.tp.start_reduce_scatter(grad_norm1_full, dim=0)  # f32[32@tp, 16@dp,mb, 64]
    functional.linear_add_grad_weight(g.attn_wo_weight, grad_attn_wo_full, attn_merged)  # f32[64, 64@tp] partial(dp,mb)
    del grad_attn_wo_full
    functional.linear_add_grad_weight(g.attn_wv_weight, grad_attn_wv, norm1_full)  # f32[32@tp, 64] partial(dp,mb)
    functional.linear_add_grad_weight(g.attn_wk_weight, grad_attn_wk, norm1_full)  # f32[32@tp, 64] partial(dp,mb)
    functional.linear_add_grad_weight(g.attn_wq_weight, grad_attn_wq, norm1_full)  # f32[64@tp, 64] partial(dp,mb)
    del norm1_full
    grad_norm1 = grad_norm1_turned_coming.wait().transpose(0, 1)  # f32[16@dp,mb, 32@tp, 64]
    grad_x_1, grad_norm1_weight = functional.rms_norm_backward(
        grad_norm1, x, (64,), p.norm1_weight, norm1_rstd
    )  # f32[2, 16, 64]
    g.norm1_weight.add_(grad_norm1_weight)
    grad_x = grad_x_2 + grad_x_1  # f32[16@dp,mb, 32@tp, 64]
    return grad_x


BLOCK = {
    "norm1.weight": Shard("f32[64]", reduce=("dp", "tp")),
    "attn.wq.weight": Shard("f32[64@tp, 64]", reduce=("dp",)),
    "attn.wk.weight": Shard("f32[32@tp, 64]", reduce=("dp",)),
    "attn.wv.weight": Shard("f32[32@tp, 64]", reduce=("dp",)),
    "attn.wo.weight": Shard("f32[64, 64@tp]", reduce=("dp",)),
    "norm2.weight": Shard("f32[64]", reduce=("dp", "tp")),
    "mlp.gate.weight": Shard("f32[176@tp, 64]", reduce=("dp",)),
    "mlp.up.weight": Shard("f32[176@tp, 64]", reduce=("dp",)),
    "mlp.down.weight": Shard("f32[64, 176@tp]", reduce=("dp",)),
}


class Stage:
    """What this stage holds, reads, sends and receives, and its part of a training step."""

    parameters = {
        "embed.weight": Shard("f32[256@tp, 64]", reduce=("dp",)),
        **{f"blocks.{i}.{name}": shard for i in range(2) for name, shard in BLOCK.items()},
    }
    inputs = {
        "ids": Shard("i64[16@dp,mb, 32]"),
    }
    sends = {
        "y_2": (1,),
    }
    gradients_from = {
        "y_2": (1,),
    }
    receives: dict[str, Received] = {}

    loss: str | None = None
    loss_partial: tuple[str, ...] = ()
    # Gradients that are summed together, each bucket once the last microbatch has been back through `after`.
    buckets = (
        Bucket(after="embed", over=("dp",), first="embed.weight", last="blocks.1.mlp.down.weight"),
        Bucket(after="embed", over=("dp", "tp"), first="blocks.0.norm1.weight", last="blocks.1.norm2.weight"),
    )
    shared: dict[tuple[int, ...], tuple[str, ...]] = {}

    def __init__(self, comm: Comm, parameters: Values, gradients: Values) -> None:
        self.comm = comm
        self.gradients = gradients
        self.embed = EmbedParams(parameters["embed.weight"])
        self.grad_embed = EmbedParams(gradients["embed.weight"])
        self.blocks = [BlockParams(*(parameters[f"blocks.{i}.{name}"] for name in BLOCK)) for i in range(2)]
        self.grad_blocks = [BlockParams(*(gradients[f"blocks.{i}.{name}"] for name in BLOCK)) for i in range(2)]
        self.sums = Sums(comm, self.parameters, gradients, self.buckets)

    def setup(self) -> None:
        """Constants, made once."""
        self.cos, self.sin = rotary(self.comm)

    def prepare(self, batch: Values) -> None:
        """What the whole of this rank's batch decides, once per step."""

    def forward(self, batch: Values, received: Values) -> tuple[Values, list[Saved]]:
        """One microbatch: what later stages (or the loss) read, and what backward needs."""
        saved: list[Saved] = []
        x, kept = embed_forward(self.comm, self.embed, batch["ids"])
        saved.append(kept)
        for p in self.blocks:
            x, kept = block_forward(self.comm, p, x, self.cos, self.sin)
            saved.append(kept)
        return {"y_2": x}, saved

    def backward(self, saved: list[Saved], gradients: Values) -> Values:
        """From the gradients of what was sent to those of what was received."""
        grad_x = gradients["y_2"]
        for p, g in zip(reversed(self.blocks), reversed(self.grad_blocks), strict=True):
            grad_x = block_backward(self.comm, p, g, grad_x, saved.pop())
        embed_backward(self.comm, self.grad_embed, grad_x, saved.pop())
        # all-reduce 212.0 KiB over dp and all-reduce 1.0 KiB over dp,tp, which starts once the last microbatch has been
        # through
        self.sums.start("embed")
        return {}

    def reduce_gradients(self) -> None:
        """After the last microbatch: sum what ranks computed parts of."""
        self.sums.finish()

    def refresh(self) -> None:
        """After the optimizer's update: what every rank keeps whole."""
