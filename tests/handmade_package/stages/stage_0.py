"""Stage 0 of 2: blocks.0."""

from typing import ClassVar, NamedTuple

import torch
from runtime.comm.comm import Comm
from runtime.execution.stage import PipelineStage
from runtime.layout import Shard
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
    """blocks.0 (model.py:17)."""
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


class Stage(PipelineStage):
    """blocks.0, and what passes between it and the other stages."""

    parameters: ClassVar[dict[str, Shard]] = {
        "blocks.0.norm.weight": Shard("f64[6]", reduce=("dp",)),
        "blocks.0.norm.bias": Shard("f64[6]", reduce=("dp",)),
        "blocks.0.up.weight": Shard("f64[10@tp, 6]", reduce=("dp",)),
        "blocks.0.up.bias": Shard("f64[10@tp]", reduce=("dp",)),
        "blocks.0.down.weight": Shard("f64[6, 10@tp]", reduce=("dp",)),
        "blocks.0.down.bias": Shard("f64[6]", reduce=("dp",)),
    }
    inputs: ClassVar[dict[str, Shard]] = {"x": Shard("f64[8@dp,mb, 6]")}
    sends: ClassVar[dict[str, tuple[int, ...]]] = {"blocks_0": (1,)}
    gradients_from: ClassVar[dict[str, tuple[int, ...]]] = {"blocks_0": (1,)}

    def __init__(self, comm: Comm, parameters: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        super().__init__(comm, parameters, gradients)
        names = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
        self.block_0 = BlockParams(*(parameters[f"blocks.0.{name}"] for name in names))
        self.grad_block_0 = BlockParams(*(gradients[f"blocks.0.{name}"] for name in names))

    def forward(self, batch: dict[str, Tensor], received: dict[str, Tensor]) -> tuple[dict[str, Tensor], Saved]:
        blocks_0, saved = block_forward(self.comm, self.block_0, batch["x"])
        return {"blocks_0": blocks_0}, saved

    def backward(self, saved: Saved, gradients: dict[str, Tensor], last: bool) -> dict[str, Tensor]:
        block_backward(self.comm, self.block_0, self.grad_block_0, gradients["blocks_0"], saved)
        return {}

    def reduce_gradients(self, last: bool) -> None:
        # all-reduce 848 B over dp: each of its ranks saw another part of the batch
        self.comm.dp.reduce_gradients(self.grad_block_0)
