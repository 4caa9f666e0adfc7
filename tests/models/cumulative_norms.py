"""Batch norms without a momentum, whose running statistics are means over all batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, bias=False)  # a bias before a norm has a gradient of rounding errors
        self.norm = nn.BatchNorm2d(6, momentum=None)
        self.head = nn.Linear(6, 4, bias=False)
        self.last = nn.BatchNorm1d(4, momentum=None, affine=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.head(self.norm(self.conv(x)).relu().mean((2, 3)))), labels)


def model() -> nn.Module:
    return Model()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(16, 3, 6, 6), "labels": torch.randint(4, (16,))}
