"""Losses that are sums, over samples and over elements, some samples weighted and some left out."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 10), nn.Softplus(), nn.Linear(10, 4))

    def forward(self, x: Tensor, label: Tensor, weight: Tensor) -> Tensor:
        scores = self.net(x)
        each = F.cross_entropy(scores, label, reduction="none", ignore_index=-1)
        return (each * weight).sum() / weight.sum() + F.mse_loss(scores, x[:, :4], reduction="sum") / 64


def model() -> nn.Module:
    return Summed()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    label = torch.randint(-1, 4, (16,), generator=draw)
    return {"x": torch.randn(16, 5, generator=draw), "label": label, "weight": torch.rand(16, generator=draw) + 0.1}
