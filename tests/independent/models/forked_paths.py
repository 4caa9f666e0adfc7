"""Branches within branches, on values, counters and random numbers, whose outcomes have weights and state of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

RANDOM = True


class Forked(nn.Module):
    mean: Tensor
    spread: Tensor
    steps: Tensor
    first: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.exits = nn.ModuleList(nn.Linear(6, 4) for _ in range(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("spread", torch.ones(6))
        self.register_buffer("first", torch.zeros(4))

    def forward(self, x: Tensor, label: Tensor, level: Tensor) -> Tensor:
        h = self.body(x)
        at, over = h.detach().mean(0), h.detach().var(0)
        if self.steps == 0:
            self.mean.copy_(at)
            self.spread.copy_(over)
        else:
            self.mean.lerp_(at, 0.1)
            self.spread.lerp_(over, 0.1)
        self.steps += 1
        h = (h - self.mean) / (self.spread + 0.1).sqrt()
        scores = self.exits[0](h)
        if level.mean() > 0.5:
            scores = self.exits[1](h.relu())
            if level[0] > 0.5:
                self.first.add_(scores.detach().mean(0))
                scores = scores - self.first
        elif level[0] > 0.5:
            h = h.clone()
            h[:, 0] = 0.5
            return nn.functional.cross_entropy(scores * h[:, :4], label)
        loss = nn.functional.cross_entropy(scores, label)
        if torch.rand(()) < 0.5:
            loss = loss * 2 + h.square().mean()
        return loss


def model() -> nn.Module:
    return Forked()


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    level = torch.rand(16, generator=g)
    level[0] = step % 2
    level[1:] = level[1:] * 0.9 + (0.1 if step % 4 < 2 else -0.1)
    return dict(x=torch.randn(16, 6, generator=g), label=torch.randint(4, (16,), generator=g), level=level)


def batch() -> dict[str, Tensor]:
    return data(0)
