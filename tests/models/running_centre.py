"""Vectors minus a running mean, which a later module updates; a counter that both modules read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class Centre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.body(x))
        with torch.no_grad():
            self.steps += 1
            self.mean.lerp_(y.mean(0), 1 / self.steps)
        return y - self.mean


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.centre = Centre()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.relu(self.first(x)) - self.centre.mean + 0.1 * self.centre.steps
        return F.cross_entropy(self.last(self.centre(x)), labels)


def model() -> nn.Module:
    return Model()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(16, WIDTH), "labels": torch.randint(WIDTH, (16,))}
