"""Triplets through one convolutional encoder, concatenated to one batch and cut apart again."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Triplets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(2, 6, 3, padding=1)
        self.conv2 = nn.Conv1d(6, 6, 3, stride=2, padding=1, groups=2)
        self.head = nn.Linear(6, 4)

    def encoded(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.conv1(x), 0.2)
        return F.normalize(self.head(F.leaky_relu(self.conv2(h), 0.2).mean(-1)), dim=-1)

    def forward(self, anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
        a, p, n = self.encoded(torch.stack([anchor, near, far], 1).flatten(0, 1)).unflatten(0, (-1, 3)).unbind(1)
        return F.triplet_margin_loss(a, p, n, margin=0.5)


def model() -> nn.Module:
    return Triplets()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 2, 10, generator=draw)
    return {"anchor": x, "near": x + 0.3, "far": torch.randn(16, 2, 10, generator=draw)}
