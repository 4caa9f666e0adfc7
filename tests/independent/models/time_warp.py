"""Soft dynamic time warping between a predicted and a given series."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Warped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.net(x)
        cost = (made[:, :, None] - y[:, None]).square()
        n, m = cost.shape[1:]
        far = torch.full_like(cost[:, 0, 0], 1e4)
        row = [torch.zeros_like(far), *[far] * m]
        for i in range(n):
            now = [far]
            for j in range(m):
                least = torch.stack((row[j], row[j + 1], now[j]), -1)
                now.append(cost[:, i, j] - 0.5 * (-least / 0.5).logsumexp(-1))
            row = now
        return row[-1].mean()


def model() -> nn.Module:
    return Warped()


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return dict(x=torch.randn(8, 5, generator=g), y=torch.randn(8, 4, generator=g))


def batch() -> dict[str, Tensor]:
    return data(0)
