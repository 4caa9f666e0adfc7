"""Inputs of many ranks and roles: numbers per batch, one tensor for all samples, entries nobody reads, empty extras."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.table = nn.Linear(6, 8), nn.Linear(8, 4), nn.Embedding(5, 8)

    def forward(self, x: Tensor, y: Tensor, anchors: Tensor, step: Tensor, unread: Tensor) -> Tensor:
        h = self.body(x) + self.table(anchors).mean(0)
        warm = torch.clamp(step / 10, max=1.0)
        near = h @ self.table(anchors).T
        return F.cross_entropy(self.head(h), y) + warm * near.logsumexp(1).mean()


def model() -> nn.Module:
    return Many()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(16, 6, generator=generator),
        "y": torch.randint(0, 4, (16,), generator=generator),
        "anchors": torch.arange(3),
        "step": torch.tensor(float(step)),
        "unread": torch.randn(16, 3, generator=generator),
    }
