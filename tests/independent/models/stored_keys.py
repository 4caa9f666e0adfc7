"""A store of past keys in a buffer, of which the oldest are replaced, and a share of neighbours in a loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Store(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ELU(), nn.Linear(8, 4))
        self.out = nn.Linear(4 + 3, 3)
        self.register_buffer("keys", torch.randn(24, 4))
        self.register_buffer("labels", torch.arange(24) % 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.body(x)
        near = -torch.cdist(z, self.keys).square()
        found, place = near.topk(5, -1)
        votes = (found.softmax(-1).unsqueeze(-1) * F.one_hot(self.labels[place], 3)).sum(1)
        self.keys = torch.cat((self.keys[len(x) :], z.detach()))
        self.labels = torch.cat((self.labels[len(x) :], y))
        return F.cross_entropy(self.out(torch.cat((z, votes), -1)), y) + F.nll_loss((votes + 1e-3).log(), y)


def model() -> nn.Module:
    return Store()


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return dict(x=torch.randn(8, 6, generator=g), y=torch.randint(3, (8,), generator=g))


def batch() -> dict[str, Tensor]:
    return data(0)
