"""Blocks of signs, whose backward is the model's own, dropped at random; another one where activations are large."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RANDOM = True


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x > 0, 1.0, -1.0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() <= 1)


class Block(nn.Module):
    runs: Tensor

    def __init__(self, d: int, p: float) -> None:
        super().__init__()
        self.a, self.b, self.p = nn.Linear(d, d), nn.Linear(d, d), p
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < self.p:
            return x
        self.runs += 1
        return x + self.b(Sign.apply(self.a(x)))


class Signs(nn.Module):
    def __init__(self, d: int = 6) -> None:
        super().__init__()
        self.enter, self.extra, self.out = nn.Linear(4, d), nn.Linear(d, d), nn.Linear(d, 3)
        self.blocks = nn.ModuleList(Block(d, 0.2 * k) for k in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = block(h)
        if h.abs().mean() > 0.8:
            h = Sign.apply(self.extra(h)) * 0.5 + h
        return F.cross_entropy(self.out(h), y)


def model() -> nn.Module:
    return Signs()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 4, generator=g), "y": torch.randint(3, (16,), generator=g)}
