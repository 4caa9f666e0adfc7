"""Layers dropped at random, one of them in two places: in steps without a layer its weights have no gradient."""

import torch
from torch import Tensor, nn

RANDOM = True


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()) for _ in range(3))
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 6)

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
        return (self.head(h) - x).square().mean()


def model() -> nn.Module:
    return Dropped()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(12, 6, generator=torch.Generator().manual_seed(step))}
