"""Three tasks whose weights are learned uncertainties, a buffer that counts steps, and a weight that grows with it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Mish(), nn.Linear(12, 12), nn.Softsign())
        self.level, self.kind, self.rank = nn.Linear(12, 3), nn.Linear(12, 4), nn.Linear(12, 1)
        self.spread = nn.Parameter(torch.zeros(3))
        self.cuts = nn.Parameter(torch.tensor([-1.0, 0.0, 1.0]))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, value: Tensor, label: Tensor, order: Tensor) -> Tensor:
        h = self.body(x)
        q = torch.tensor([0.1, 0.5, 0.9], dtype=x.dtype)
        miss = value.unsqueeze(-1) - self.level(h)
        pinball = torch.maximum(q * miss, (q - 1) * miss).mean()
        kind = F.cross_entropy(self.kind(h), label, weight=torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=x.dtype))
        above = self.rank(h) - self.cuts.cumsum(0)
        ordinal = F.binary_cross_entropy_with_logits(above, (order[:, None] > torch.arange(3)).to(x.dtype))
        self.steps += 1
        warm = (self.steps / 4).clamp(max=1.0)
        losses = torch.stack((pinball, kind, ordinal * warm))
        return (losses * (-self.spread).exp() + self.spread).sum()


def model() -> nn.Module:
    return Tasks()


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return dict(
        x=torch.randn(8, 6, generator=g),
        value=torch.randn(8, generator=g),
        label=torch.randint(4, (8,), generator=g),
        order=torch.randint(4, (8,), generator=g),
    )


def batch() -> dict[str, Tensor]:
    return data(0)
