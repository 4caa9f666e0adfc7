"""Stage 1 of 2: blocks.2 to blocks.3 and head.

Emitted by partc from model.py for pp=2,dp=2,tp=2.
"""

from typing import Any

import torch
from regions.block import BlockParams, block_backward, block_forward
from regions.head import HeadParams, head_backward, head_forward
from regions.make_count import make_count
from regions.rotary import rotary
from runtime.comm.comm import Comm
from runtime.execution.stage import PipelineStage
from runtime.execution.sums import Bucket, Sums
from runtime.layout import Received, Shard
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
        **{f"blocks.{i}.{name}": shard for i in range(2, 4) for name, shard in BLOCK.items()},
        "norm.weight": Shard("f32[64]", reduce=("dp", "tp")),
        "head.weight": Shard("f32[256@tp, 64]", reduce=("dp",)),
    }
    inputs = {
        "labels": Shard("i64[16@dp,mb, 32]"),
    }
    receives = {
        "y_2": Received(source=0, shape=(2, 16, 64), dtype="f32"),
    }
    loss = "loss"
    loss_partial = ("dp",)
    # Gradients that are summed over ranks together.
    buckets = {
        "blocks.2": Bucket(over=("dp", "tp"), first="blocks.2.norm1.weight", last="norm.weight"),
        "dp.blocks.2": Bucket(over=("dp",), first="blocks.2.attn.wq.weight", last="head.weight"),
    }

    def __init__(self, comm: Comm, parameters: Values, gradients: Values) -> None:
        super().__init__(comm, parameters, gradients)
        self.blocks = [BlockParams(*(parameters[f"blocks.{i}.{name}"] for name in BLOCK)) for i in range(2, 4)]
        self.grad_blocks = [BlockParams(*(gradients[f"blocks.{i}.{name}"] for name in BLOCK)) for i in range(2, 4)]
        self.head = HeadParams(parameters["norm.weight"], parameters["head.weight"])
        self.grad_head = HeadParams(gradients["norm.weight"], gradients["head.weight"])
        self.sums = Sums(comm, self.parameters, gradients, self.buckets)

    def setup(self) -> None:
        """Constants, computed once."""
        self.cos, self.sin = rotary(self.comm)

    def prepare(self, batch: Values) -> None:
        """Values that depend on the whole of this rank's batch, once per step."""
        self.count = make_count(self.comm, batch["labels"])

    def forward(self, batch: Values, received: Values) -> tuple[Values, list[Any]]:
        """One microbatch: the values that later stages (or the loss) read, and the tensors saved for backward."""
        saved: list[Any] = []
        x = received["y_2"]
        for p in self.blocks:
            x, kept = block_forward(self.comm, p, x, self.cos, self.sin)
            saved.append(kept)
        loss, kept = head_forward(self.comm, self.head, x, batch["labels"], self.count)
        saved.append(kept)
        return {"loss": loss}, saved

    def backward(self, saved: list[Any], gradients: Values, last: bool) -> Values:
        """From the gradients of sent values to those of received ones."""
        grad_loss = torch.ones((), dtype=torch.float32, device=self.comm.device)
        grad_x = head_backward(self.comm, self.head, self.grad_head, grad_loss, saved.pop())
        for p, g in zip(reversed(self.blocks), reversed(self.grad_blocks), strict=True):
            grad_x = block_backward(self.comm, p, g, grad_x, saved.pop())
        if last:
            # all-reduce 1.9 KiB over dp,tp
            self.sums["blocks.2"].start()
            # all-reduce 212.0 KiB over dp
            self.sums["dp.blocks.2"].start()
        return {"y_2": grad_x}

    def reduce_gradients(self, last: bool) -> None:
        """After a batch's last microbatch: the ends of scatters and sums of gradients."""
        if last:
            self.sums["blocks.2"].wait()
            self.sums["dp.blocks.2"].wait()
