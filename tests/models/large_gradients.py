"""A weight whose gradient, times fp16's first loss scale, is 1.2 · 2^16 for a whole batch: above fp16's largest number.

With `low`, the loss itself is a mean in fp16, as autocast computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Sloped(nn.Module):
    def __init__(self, low: bool) -> None:
        super().__init__()
        self.low = low
        self.weight = nn.Linear(4, 4, bias=False)
        self.gain = 0.1 if low else 4.8

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight(x) * self.gain
        return y.mean() if self.low else y.float().mean()


def model(low: bool = False) -> nn.Module:
    return Sloped(low)


def data(step: int) -> dict[str, Tensor]:
    return {"x": torch.ones(8, 4) + step % 2 / 64}


def batch() -> dict[str, Tensor]:
    return data(0)
