"""Slot attention: slots compete for tokens in three rounds with one recurrent cell."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Slots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(3, 8))
        self.norm_x, self.norm_s = nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.cell = nn.GRUCell(8, 8)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm_x(x)
        k, v = self.k(x), self.v(x)
        slots = self.start.expand(x.shape[0], -1, -1)
        for _ in range(3):
            shares = (self.q(self.norm_s(slots)) @ k.mT * 8**-0.5).softmax(1) + 1e-8
            means = (shares / shares.sum(-1, keepdim=True)) @ v
            slots = self.cell(means.reshape(-1, 8), slots.reshape(-1, 8)).view_as(slots)
            slots = slots + self.mlp(slots)
        return F.cross_entropy(self.out(slots.amax(1)), y)


def model() -> nn.Module:
    return Slots()


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return dict(x=torch.randn(8, 6, 8, generator=g), y=torch.randint(4, (8,), generator=g))


def batch() -> dict[str, Tensor]:
    return data(0)
