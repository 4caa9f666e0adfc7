"""A model inside DataParallel, which has one device."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.DataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(x), y)


def model() -> nn.Module:
    return Wrapped()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
