"""Blocks with dropout, in a checkpoint of the model's own that saves and restores the state of torch's generator."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RANDOM = True


class Checkpointed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: nn.Module, x: Tensor) -> Tensor:
        ctx.state, ctx.run = torch.get_rng_state(), run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return cast("Tensor", run(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            out = ctx.run(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 12), nn.Linear(12, 6), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", x + self.drop(self.down(self.drop(torch.tanh(self.up(x))))))


class Net(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.enter, self.head, self.drop = nn.Linear(6, 6), nn.Linear(6, 3), nn.Dropout(0.2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = self.drop(x)
            x = Checkpointed.apply(block, x) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(self.drop(x)), y)


def model(checkpointed: bool = False) -> nn.Module:
    return Net(checkpointed)


def data(step: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 6, generator=drawn), "y": torch.randint(3, (8,), generator=drawn)}


def batch() -> dict[str, Tensor]:
    return data(0)
