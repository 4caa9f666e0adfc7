"""Weights, and a buffer of places, that the constructor draws from the generators of Python and NumPy."""

import random

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.scale = nn.Parameter(torch.tensor([random.uniform(0.5, 1.5) for _ in range(16)]))
        self.weight = nn.Parameter(torch.from_numpy(numpy.random.randn(4, 16)).float())
        self.register_buffer("places", torch.tensor(random.sample(range(16), 16)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear((self.first(x) * self.scale)[:, self.places].tanh(), self.weight), y)


def model() -> nn.Module:
    return Drawn()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(12, 8, generator=generator), "y": torch.randint(0, 4, (12,), generator=generator)}
