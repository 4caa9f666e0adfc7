"""Stage 0 of 1: embed, blocks.0 to blocks.3 and head.

Emitted by partc from model.py for pp=1,dp=2,tp=2.
"""

from typing import Any

import torch
from regions.block import BlockParams, block_backward, block_forward
from regions.embed import EmbedParams, embed_backward, embed_forward
from regions.head import HeadParams, head_backward, head_forward
from regions.make_count import make_count
from regions.rotary import rotary
from runtime.comm.comm import Comm
from runtime.execution.parts import DONE, Parts, Unit
from runtime.execution.stage import PipelineStage
from runtime.execution.sums import Bucket, Sums
from runtime.layout import Shard
from torch import Tensor

Values = dict[str, Tensor]


BLOCK = {
    "norm1.weight": Shard("f32[64@dp]", reduce=("tp",), read="bf16", gather=("dp",)),
    "attn.wq.weight": Shard("f32[64@tp,dp, 64]", read="bf16", gather=("dp",)),
    "attn.wk.weight": Shard("f32[32@tp,dp, 64]", read="bf16", gather=("dp",)),
    "attn.wv.weight": Shard("f32[32@tp,dp, 64]", read="bf16", gather=("dp",)),
    "attn.wo.weight": Shard("f32[64@dp, 64@tp]", read="bf16", gather=("dp",)),
    "norm2.weight": Shard("f32[64@dp]", reduce=("tp",), read="bf16", gather=("dp",)),
    "mlp.gate.weight": Shard("f32[176@tp,dp, 64]", read="bf16", gather=("dp",)),
    "mlp.up.weight": Shard("f32[176@tp,dp, 64]", read="bf16", gather=("dp",)),
    "mlp.down.weight": Shard("f32[64@dp, 176@tp]", read="bf16", gather=("dp",)),
}


class Stage(PipelineStage):
    """The parameters, inputs and transfers of this stage, and its part of a training step."""

    parameters = {
        "embed.weight": Shard("f32[256@tp,dp, 64]", read="bf16", gather=("dp",)),
        **{f"blocks.{i}.{name}": shard for i in range(4) for name, shard in BLOCK.items()},
        "norm.weight": Shard("f32[64@dp]", reduce=("tp",), read="bf16", gather=("dp",)),
        "head.weight": Shard("f32[256@tp,dp, 64]", read="bf16", gather=("dp",)),
    }
    inputs = {
        "ids": Shard("i64[16@dp, 32]"),
        "labels": Shard("i64[16@dp, 32]"),
    }
    loss = "loss"
    loss_partial = ("dp",)
    # Gradients that are summed over ranks together.
    buckets = {
        "stage.0": Bucket(over=("tp",), first="blocks.0.norm1.weight", last="norm.weight"),
    }
    lookahead = 1  # gathers of later actions that an action starts

    def __init__(self, comm: Comm, parameters: Values, gradients: Values) -> None:
        super().__init__(comm, parameters, gradients)
        self.parts = Parts(comm, self.parameters, parameters, gradients)
        self.embed = self.parts.unit(EmbedParams, "embed.weight")
        self.blocks = [self.parts.unit(BlockParams, *(f"blocks.{i}.{name}" for name in BLOCK)) for i in range(4)]
        self.head = self.parts.unit(HeadParams, "norm.weight", "head.weight")
        self.sums = Sums(comm, self.parameters, gradients, self.buckets, self.parts)
        self.scattering = DONE
        # Parameters that each action gathers first. An earlier action starts these gathers.
        self.first_units = {
            "F": (self.embed,),
            "B": (self.head,),
        }

    def setup(self) -> None:
        """Constants, computed once."""
        self.cos, self.sin = rotary(self.comm)

    def prepare(self, batch: Values) -> None:
        """Values that depend on the whole of this rank's batch, once per step."""
        self.count = make_count(self.comm, batch["labels"])

    def forward(self, batch: Values, received: Values, ahead: Unit) -> tuple[Values, list[Any]]:
        """One microbatch: the values that later stages (or the loss) read, and the tensors saved for backward."""
        saved: list[Any] = []
        self.embed.wait()
        # all-gather 22.6 KiB in bf16 over dp, while this call runs
        self.blocks[0].gather()
        x, kept = embed_forward(self.comm, self.embed.whole, batch["ids"])
        self.embed.free()
        saved.append(kept)
        for unit, following in zip(self.blocks, (*self.blocks[1:], self.head), strict=True):
            unit.wait()
            # all-gather 22.6 KiB in bf16 over dp, while this call runs; other calls: all-gather 8.1 KiB in bf16 over dp
            following.gather()
            x, kept = block_forward(self.comm, unit.whole, x, self.cos, self.sin)
            unit.free()
            saved.append(kept)
        self.head.wait()
        ahead.gather()
        loss, kept = head_forward(self.comm, self.head.whole, x, batch["labels"], self.count)
        self.head.free()
        saved.append(kept)
        return {"loss": loss}, saved

    def backward(self, saved: list[Any], gradients: Values, last: bool, ahead: Unit) -> Values:
        """From the gradients of sent values to those of received ones."""
        grad_loss = torch.ones((), dtype=torch.float32, device=self.comm.device)
        self.head.wait()
        # all-gather 22.6 KiB in bf16 over dp, while this call runs
        self.blocks[3].gather()
        grad_x, g = head_backward(self.comm, self.head.whole, grad_loss, saved.pop())
        self.head.free()
        self.scattering.wait()
        # reduce-scatter 16.1 KiB over dp, while the next call runs: each rank keeps its shard of the sum
        self.scattering = self.head.scatter(g)
        del g
        for unit, following in zip(reversed(self.blocks), (*reversed(self.blocks[:3]), ahead), strict=True):
            unit.wait()
            # all-gather 22.6 KiB in bf16 over dp, while this call runs
            following.gather()
            grad_x, g = block_backward(self.comm, unit.whole, grad_x, saved.pop())
            unit.free()
            self.scattering.wait()
            # reduce-scatter 45.2 KiB over dp, while the next call runs: each rank keeps its shard of the sum
            self.scattering = unit.scatter(g)
            del g
        g = embed_backward(self.comm, grad_x, saved.pop())
        self.scattering.wait()
        # reduce-scatter 16.0 KiB over dp, while the next call runs: each rank keeps its shard of the sum
        self.scattering = self.embed.scatter(g)
        del g
        return {}

    def reduce_gradients(self, last: bool) -> None:
        """After a batch's last microbatch: the ends of scatters and sums of gradients."""
        self.scattering.wait()
        if last:
            # all-reduce 1.1 KiB over tp
            self.sums["stage.0"].start()
            self.sums["stage.0"].wait()
