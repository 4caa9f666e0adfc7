"""Region embed.

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


class EmbedParams(NamedTuple):
    embed_weight: Tensor  # bf16[256@tp, 64] vary(dp)


@dataclass(slots=True)
class EmbedSaved:
    """Tensors that forward keeps for backward, which deletes the large ones after their last use."""

    ids: Tensor  # i64[16@dp, 32]


def embed_forward(
    comm: Comm,
    p: EmbedParams,
    ids: Tensor,  # i64[16@dp, 32]
) -> tuple[Tensor, EmbedSaved]:
    """embed (gpt.py:106)."""
    embed_partial = functional.embedding_shard(p.embed_weight, ids, comm.tp.rank)  # bf16[16@dp, 32, 64] partial(tp)
    # reduce-scatter 16.0 KiB over tp: each rank has a part of the sum in embed and keeps its share of dim 1
    embed_2 = comm.tp.reduce_scatter(embed_partial, dim=1)  # bf16[16@dp, 32@tp, 64]
    return embed_2, EmbedSaved(ids=ids)


def embed_backward(
    comm: Comm,
    grad_embed: Tensor,  # bf16[16@dp, 32@tp, 64]
    saved: EmbedSaved,
) -> EmbedParams:
    # all-gather 16.0 KiB over tp: embed needs all of dim 1
    grad_embed_full = comm.tp.all_gather(grad_embed, dim=1)  # bf16[16@dp, 32, 64]
    grad_embed_weight = kernels.embedding_grad(grad_embed_full, saved.ids, comm.tp.rank)  # bf16[256@tp, 64] partial(dp)
    g = EmbedParams(embed_weight=grad_embed_weight)
    return g
