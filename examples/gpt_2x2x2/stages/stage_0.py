"""Stage 0 of 2: embed and blocks.0 to blocks.1.

Emitted by partc from model.py for pp=2,dp=2,tp=2.
"""

from typing import Any

from regions.block import BlockParams, block_backward, block_forward
from regions.embed import EmbedParams, embed_backward, embed_forward
from regions.rotary import rotary
from runtime.comm.comm import Comm
from runtime.execution.stage import PipelineStage
from runtime.execution.sums import Bucket, Sums
from runtime.layout import Shard
from torch import Tensor

Values = dict[str, Tensor]


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


class Stage(PipelineStage):
    """The parameters, inputs and transfers of this stage, and its part of a training step."""

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
    # Gradients that are summed over ranks together.
    buckets = {
        "embed": Bucket(over=("dp",), first="embed.weight", last="blocks.1.mlp.down.weight"),
        "dp_tp.embed": Bucket(over=("dp", "tp"), first="blocks.0.norm1.weight", last="blocks.1.norm2.weight"),
    }

    def __init__(self, comm: Comm, parameters: Values, gradients: Values) -> None:
        super().__init__(comm, parameters, gradients)
        self.embed = EmbedParams(parameters["embed.weight"])
        self.grad_embed = EmbedParams(gradients["embed.weight"])
        self.blocks = [BlockParams(*(parameters[f"blocks.{i}.{name}"] for name in BLOCK)) for i in range(2)]
        self.grad_blocks = [BlockParams(*(gradients[f"blocks.{i}.{name}"] for name in BLOCK)) for i in range(2)]
        self.sums = Sums(comm, self.parameters, gradients, self.buckets)

    def setup(self) -> None:
        """Constants, computed once."""
        self.cos, self.sin = rotary(self.comm)

    def forward(self, batch: Values, received: Values) -> tuple[Values, list[Any]]:
        """One microbatch: the values that later stages (or the loss) read, and the tensors saved for backward."""
        saved: list[Any] = []
        x, kept = embed_forward(self.comm, self.embed, batch["ids"])
        saved.append(kept)
        for p in self.blocks:
            x, kept = block_forward(self.comm, p, x, self.cos, self.sin)
            saved.append(kept)
        return {"y_2": x}, saved

    def backward(self, saved: list[Any], gradients: Values, last: bool) -> Values:
        """From the gradients of sent values to those of received ones."""
        grad_x = gradients["y_2"]
        for p, g in zip(reversed(self.blocks), reversed(self.grad_blocks), strict=True):
            grad_x = block_backward(self.comm, p, g, grad_x, saved.pop())
        embed_backward(self.comm, self.grad_embed, grad_x, saved.pop())
        if last:
            # all-reduce 212.0 KiB over dp
            self.sums["embed"].start()
            # all-reduce 1.5 KiB over dp,tp
            self.sums["dp_tp.embed"].start()
        return {}

    def reduce_gradients(self, last: bool) -> None:
        """After a batch's last microbatch: the ends of scatters and sums of gradients."""
        if last:
            self.sums["embed"].wait()
            self.sums["dp_tp.embed"].wait()
