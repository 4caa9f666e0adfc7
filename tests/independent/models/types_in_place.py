"""In-place changes by operands of wider types than the changed tensor, and in-place comparisons."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Types(nn.Module):
    small: Tensor
    sums: Tensor
    bytes: Tensor
    scale: Tensor
    seen: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("small", torch.ones(6, dtype=torch.int8))
        self.register_buffer("sums", torch.zeros(6, dtype=torch.int32))
        self.register_buffer("bytes", torch.zeros(6, dtype=torch.uint8))
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("seen", torch.zeros(6, dtype=torch.bool))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int16))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        h = self.layer(x)
        counts = torch.bincount(label, minlength=6)
        self.small.add_(counts).clamp_(max=100)
        self.sums.mul_(2).sub_(counts)
        self.bytes[1:4].add_(counts[1:4])
        self.steps += counts.sum()
        self.scale.mul_(counts + 1).add_(self.small)
        self.seen.logical_or_(counts > 3)
        self.seen |= self.sums > 0
        above = h.detach().clone().gt_(0)
        above[:, 0].logical_not_()
        below = h.detach().clone().lt_(self.scale)
        scaled = h * 1
        scaled[:, 2:] *= self.small[2:]
        scaled.pow_(2)
        kept = (h * self.seen).sum() / 60 + (h * self.bytes).mean() + h.mean() * self.steps / 100
        return (scaled * above + h * below).mean() + kept


def model() -> nn.Module:
    return Types()


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return dict(x=torch.randn(16, 6, generator=g), label=torch.randint(6, (16,), generator=g))


def batch() -> dict[str, Tensor]:
    return data(0)
