"""Buffers that forward changes through views, after their last read; and a spectral norm that is used twice."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

WIDTH = 8
NAMES = ("viewed", "turned", "permuted", "row", "column", "detached", "stacked", "twice")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = spectral_norm(nn.Linear(WIDTH, WIDTH))
        for name in NAMES:
            self.register_buffer(name, torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.body(torch.relu(self.body(x)))
        loss = F.cross_entropy(y + sum(getattr(self, name).mean(0) for name in NAMES), labels)
        seen = (y.detach().t() @ x).tanh()
        self.viewed.view(-1).mul_(0.9)
        self.turned.t().add_(seen)
        self.permuted.permute(1, 0)[2:4].copy_(seen[:2])
        self.row.view(2, 4, WIDTH)[1, 0].add_(seen[3])
        self.column.T[1].fill_(0.25)
        self.detached.detach().lerp_(seen, 0.1)
        self.stacked.unsqueeze(0).squeeze(0).add_(seen)
        with torch.no_grad():
            changed = self.twice.mul_(0.5)
        with torch.no_grad():
            changed.add_(seen)
        return loss


def model() -> nn.Module:
    return Model()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(16, WIDTH), "labels": torch.randint(WIDTH, (16,))}
