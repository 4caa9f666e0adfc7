"""Losses that divide and multiply by sizes of the batch and of its parts, written in many ways."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.body(x))
        each = F.cross_entropy(self.head(h), y, reduction="none")
        count = torch.tensor(float(x.size(0)))
        return (
            each.sum() / len(x)
            + each.sum() / count
            + each.sum() / y.numel()
            + F.cross_entropy(self.head(h), y, reduction="sum") / x.shape[0] ** 0.5
            + h.sum() / h.numel()
            + h.square().sum(0).sqrt().sum() / x.shape[0]
            + (h.sum(0) / x.shape[0]).square().sum()
            + torch.ones(x.shape[0]).mul(each).sum().mul(1 / x.shape[0])
            + torch.full_like(each, 2.0).sum() * each.mean() / x.shape[0]
        )


def model() -> nn.Module:
    return Sizes()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
