"""Models that tests pass to partc.compile as objects."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Two layers with a residual, odd sizes; tells its input's mean square error from zero."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.up = nn.Linear(5, width)
        self.down = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def build() -> nn.Module:
    return Net()


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def judge(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = model(batch["x"])
    return {"square": found.square().mean(), "positive": (found > 0).sum()}
