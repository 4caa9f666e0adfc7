"""A spiking network: gradients stand in for a step's, membranes leak by learned shares, states begin in forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, alpha: float) -> Tensor:
        ctx.save_for_backward(v)
        ctx.alpha = alpha
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (v,) = ctx.saved_tensors
        return grads[0] / (1 + (ctx.alpha * torch.pi / 2 * v) ** 2) * ctx.alpha / 2, None


class Leaky(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.beta, self.threshold = nn.Parameter(torch.full((n,), 0.9)), nn.Parameter(torch.ones(n))
        self.mem: Tensor | None = None

    def forward(self, current: Tensor) -> Tensor:
        if self.mem is None:
            self.mem = torch.zeros_like(current)
        self.mem = self.beta.clamp(0, 1) * self.mem + current
        spikes: Tensor = Spike.apply(self.mem - self.threshold, 2.0)
        self.mem = self.mem - spikes * self.threshold
        return spikes


class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.first, self.out, self.last = nn.Linear(7, 10), Leaky(10), nn.Linear(10, 4), Leaky(4)

    def forward(self, x: Tensor) -> Tensor:
        self.first.mem = self.last.mem = None
        rows = []
        for t in range(x.shape[1]):
            spikes = self.first(self.enter(x[:, t].to(self.enter.weight.dtype)))
            rows.append(self.last(self.out(spikes)))
        return torch.stack(rows)


def model() -> nn.Module:
    return Spiking()


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    spikes = model(batch[0])
    return F.cross_entropy(spikes.sum(0), batch[1]) + (spikes.mean(0) - 0.2).pow(2).mean()


def batch() -> list[Tensor]:
    return data(0)


def data(step: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(step)
    return [torch.rand(16, 6, 7, generator=g) < 0.4, torch.randint(4, (16,), generator=g)]
