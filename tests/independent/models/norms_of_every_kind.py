"""Norms side by side: cumulative averages, statistics without weights, a renorm, group and local, in one stack."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding="same", bias=False)
        self.cumulative = nn.BatchNorm2d(8, momentum=None)
        self.plain = nn.BatchNorm2d(8, affine=False, track_running_stats=False)
        self.instance = nn.InstanceNorm2d(8, track_running_stats=True)
        self.group = nn.GroupNorm(8, 8)
        self.wide = nn.LayerNorm((8, 4, 4), bias=False)
        self.rows = nn.BatchNorm1d(8, eps=1e-3, momentum=0.3)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.conv(x)
        h = F.gelu(self.cumulative(h)) + 0.5 * self.plain(h * h)
        h = F.logsigmoid(self.group(self.instance(h))) + self.wide(h)
        h = self.rows(h.flatten(2).transpose(1, 2).reshape(-1, 8)).view(x.shape[0], -1, 8).mean(1)
        return F.cross_entropy(self.head(h), y)


def model() -> nn.Module:
    return Norms()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 2, 4, 4, generator=generator), "y": torch.randint(0, 3, (16,), generator=generator)}
