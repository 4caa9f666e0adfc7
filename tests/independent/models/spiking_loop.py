"""Twelve steps of spiking cells as a loop over time: counters, a flag that stays, masks and weights of each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 12


class Bell(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, v: Tensor) -> Tensor:
        return grad * torch.exp(-v.abs())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v >= 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        slope: Tensor = Bell.apply(grads[0], *ctx.saved_tensors)
        return slope


class Loop(nn.Module):
    def __init__(self, d: int = 6) -> None:
        super().__init__()
        self.enter, self.turn = nn.Linear(3, d), nn.Linear(d, d, bias=False)
        self.decay, self.gains = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.randn(STEPS, d) * 0.2)
        self.out = nn.Linear(2 * d, 4)

    def forward(self, x: Tensor, keep: Tensor, y: Tensor) -> Tensor:
        s = self.enter(x)
        v = z = torch.zeros_like(s[:, 0])
        count = torch.zeros(len(x), dtype=torch.long)
        done = torch.zeros(len(x), dtype=torch.bool)
        rows = []
        for t in range(STEPS):
            v = torch.sigmoid(self.decay) * v + s[:, t] + self.turn(z) * self.gains[t] - z
            z = Step.apply(v - 0.5) * keep[:, t, None]
            count = count + (z.sum(1) > 2).long()
            done = done | (count > 3)
            v = torch.where(done[:, None], v * 0.9, v)
            rows.append(z)
        h = torch.cat([torch.stack(rows, 1).mean(1), v], 1)
        return (F.cross_entropy(self.out(h), y, reduction="none") * (1 + 0.1 * count)).mean()


def model() -> nn.Module:
    return Loop()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(16, STEPS, 3, generator=g),
        "keep": (torch.rand(16, STEPS, generator=g) < 0.8).float(),
        "y": torch.randint(4, (16,), generator=g),
    }
