"""One block at several depths with norms of each depth, halting shares, and a penalty on their number."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Ponder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8)
        self.block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.norms = nn.ModuleList(nn.RMSNorm(8) for _ in range(4))
        self.halt, self.out = nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        h = self.words(ids).mean(1)
        left = torch.ones_like(h[:, 0])
        loss, cost = h.new_zeros(()), h.new_zeros(())
        for depth, norm in enumerate(self.norms):
            h = h + self.block(norm(h))
            stop = self.halt(h).squeeze(-1).sigmoid() if depth < 3 else torch.ones_like(left)
            share, left = left * stop, left * (1 - stop)
            loss = loss + (share * F.cross_entropy(self.out(h), y, reduction="none")).mean()
            cost = cost + (depth + 1) * share.mean()
        return loss + 0.01 * cost


def model() -> nn.Module:
    return Ponder()


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return dict(ids=torch.randint(9, (8, 5), generator=g), y=torch.randint(3, (8,), generator=g))


def batch() -> dict[str, Tensor]:
    return data(0)
