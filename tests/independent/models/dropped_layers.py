"""Layers dropped at random, one of them in two places: in steps without a layer its weights have no gradient.

The last layers stop gradients: one that runs leaves those before it without any.
"""

import torch
from torch import Tensor, nn

RANDOM = True


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()) for _ in range(3))
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            if torch.rand(()) < 0.6:
                continue
            h = h + layer(h)
        for _ in range(2):
            if torch.rand(()) < 0.7:
                continue
            h = self.shared(h)
        for layer in self.last:
            if torch.rand(()) < 0.5:
                continue
            h = layer(h.detach()).tanh()
        return (self.head(h) - x).square().mean()


def model() -> nn.Module:
    return Dropped()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(12, 6, generator=torch.Generator().manual_seed(step))}
