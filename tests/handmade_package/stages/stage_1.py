"""Stage 1 of 2: blocks.1, head and loss."""

from typing import ClassVar, NamedTuple

import torch
from runtime.comm.comm import Comm
from runtime.execution.stage import PipelineStage
from runtime.layout import Received, Shard
from runtime.ops import functional
from torch import Tensor
from torch.nn import functional as F

Saved = tuple[Tensor, ...]


class BlockParams(NamedTuple):
    norm_weight: Tensor  # f64[6]
    norm_bias: Tensor  # f64[6]
    up_weight: Tensor  # f64[10@tp, 6]
    up_bias: Tensor  # f64[10@tp]
    down_weight: Tensor  # f64[6, 10@tp]
    down_bias: Tensor  # f64[6]


def block_forward(comm: Comm, p: BlockParams, x: Tensor) -> tuple[Tensor, Saved]:
    """blocks.1 (model.py:17)."""
    norm, mean, rstd = torch.native_layer_norm(x, (6,), p.norm_weight, p.norm_bias, 1e-05)  # f64[8@dp,mb, 6]
    up = F.linear(norm, p.up_weight, p.up_bias)  # f64[8@dp,mb, 10@tp]
    gelu = F.gelu(up)  # f64[8@dp,mb, 10@tp]
    down = F.linear(gelu, p.down_weight)  # f64[8@dp,mb, 6] partial(tp)
    # all-reduce 96 B over tp: down contracts its sharded dimension
    down = comm.tp.all_reduce_(down)  # f64[8@dp,mb, 6]
    down = down + p.down_bias
    y = x + down
    return y, (x, norm, mean, rstd, up, gelu)


def block_backward(comm: Comm, p: BlockParams, g: BlockParams, grad_y: Tensor, saved: Saved) -> Tensor:
    x, norm, mean, rstd, up, gelu = saved
    g.down_bias.add_(functional.linear_grad_bias(grad_y))
    functional.linear_add_grad_weight(g.down_weight, grad_y, gelu)
    grad_gelu = grad_y @ p.down_weight  # f64[8@dp,mb, 10@tp]
    grad_up = torch.ops.aten.gelu_backward(grad_gelu, up, approximate="none")
    g.up_bias.add_(functional.linear_grad_bias(grad_up))
    functional.linear_add_grad_weight(g.up_weight, grad_up, norm)
    grad_norm = grad_up @ p.up_weight  # f64[8@dp,mb, 6] partial(tp)
    # all-reduce 96 B over tp: every rank's part of up read the whole of norm
    grad_norm = comm.tp.all_reduce_(grad_norm)
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
        grad_norm, x, (6,), mean, rstd, p.norm_weight, p.norm_bias, (True, True, True)
    )
    g.norm_weight.add_(grad_weight)
    g.norm_bias.add_(grad_bias)
    return grad_y + grad_x


class HeadParams(NamedTuple):
    weight: Tensor  # f64[14@tp, 6]


def head_forward(comm: Comm, p: HeadParams, x: Tensor, labels: Tensor, count: Tensor) -> tuple[Tensor, Saved]:
    """head and the loss (model.py:30)."""
    logits = F.linear(x, p.weight)  # f64[8@dp,mb, 14@tp]
    largest = functional.shard_max(logits)
    # all-reduce (maximum) 16 B over tp: cross-entropy over a sharded vocabulary
    largest = comm.tp.all_reduce_(largest, "max")  # f64[8@dp,mb]
    sums = functional.sum_exp(logits, largest)
    # all-reduce 16 B over tp
    sums = comm.tp.all_reduce_(sums)
    picked = functional.pick(logits, labels, offset=comm.tp.rank * 7)
    # all-reduce 16 B over tp
    picked = comm.tp.all_reduce_(picked)
    lse = functional.log_sum_exp(largest, sums)
    nll = functional.cross_entropy_rows(lse, picked, labels)  # f64[8@dp,mb]
    loss = nll.sum() / count  # f64[] partial(dp,mb)
    return loss, (x, logits, labels, lse, count)


def head_backward(comm: Comm, p: HeadParams, g: HeadParams, saved: Saved) -> Tensor:
    x, logits, labels, lse, count = saved
    grad_nll = (1.0 / count).expand(labels.shape)
    grad_logits = functional.cross_entropy_backward(grad_nll, logits, labels, lse, offset=comm.tp.rank * 7)
    functional.linear_add_grad_weight(g.weight, grad_logits, x)
    grad_x = grad_logits @ p.weight  # f64[8@dp,mb, 6] partial(tp)
    # all-reduce 96 B over tp: every rank's part of the logits read the whole of x
    return comm.tp.all_reduce_(grad_x)


def count_labels(comm: Comm, labels: Tensor) -> Tensor:
    """How many rows the loss averages over (model.py:30)."""
    count = labels.ne(-100).to(torch.float64).sum()  # f64[] partial(dp)
    # all-reduce 8 B over dp: the batch is sharded
    return comm.dp.all_reduce_(count)


class Stage(PipelineStage):
    """blocks.1, head and loss, and what passes between it and the other stages."""

    parameters: ClassVar[dict[str, Shard]] = {
        "blocks.1.norm.weight": Shard("f64[6]", reduce=("dp",)),
        "blocks.1.norm.bias": Shard("f64[6]", reduce=("dp",)),
        "blocks.1.up.weight": Shard("f64[10@tp, 6]", reduce=("dp",)),
        "blocks.1.up.bias": Shard("f64[10@tp]", reduce=("dp",)),
        "blocks.1.down.weight": Shard("f64[6, 10@tp]", reduce=("dp",)),
        "blocks.1.down.bias": Shard("f64[6]", reduce=("dp",)),
        "head.weight": Shard("f64[14@tp, 6]", reduce=("dp",)),
    }
    inputs: ClassVar[dict[str, Shard]] = {"labels": Shard("i64[8@dp,mb]")}
    receives: ClassVar[dict[str, Received]] = {"blocks_0": Received(source=0, shape=(2, 6), dtype="f64")}
    loss: ClassVar[str | None] = "loss"
    loss_partial: ClassVar[tuple[str, ...]] = ("dp",)

    def __init__(self, comm: Comm, parameters: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        super().__init__(comm, parameters, gradients)
        names = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
        self.block_1 = BlockParams(*(parameters[f"blocks.1.{name}"] for name in names))
        self.grad_block_1 = BlockParams(*(gradients[f"blocks.1.{name}"] for name in names))
        self.head = HeadParams(parameters["head.weight"])
        self.grad_head = HeadParams(gradients["head.weight"])

    def prepare(self, batch: dict[str, Tensor]) -> None:
        self.count = count_labels(self.comm, batch["labels"])

    def forward(self, batch: dict[str, Tensor], received: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[Saved]]:
        blocks_1, saved_block_1 = block_forward(self.comm, self.block_1, received["blocks_0"])
        loss, saved_head = head_forward(self.comm, self.head, blocks_1, batch["labels"], self.count)
        return {"loss": loss}, [saved_block_1, saved_head]

    def backward(self, saved: list[Saved], gradients: dict[str, Tensor], last: bool) -> dict[str, Tensor]:
        grad_blocks_1 = head_backward(self.comm, self.head, self.grad_head, saved.pop())
        grad_blocks_0 = block_backward(self.comm, self.block_1, self.grad_block_1, grad_blocks_1, saved.pop())
        return {"blocks_0": grad_blocks_0}

    def reduce_gradients(self, last: bool) -> None:
        # all-reduce 1184 B over dp: each of its ranks saw another part of the batch
        self.comm.dp.reduce_gradients((*self.grad_block_1, *self.grad_head))
