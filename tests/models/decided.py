"""Masks that compare integers, some of which are equal for all numbers that the integers can be."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Masked(nn.Module):
    """Masks of the places of the largest scores, of which there are four."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4, bias=False)
        self.up, self.unread = nn.Linear(6, 6), nn.Parameter(torch.randn(6))
        self.table = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor, number: Tensor, target: Tensor) -> Tensor:
        scores, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        y = self.up(x).masked_fill(chosen[:, :1] >= 3, 0.0)  # true for some
        y = y.masked_fill((chosen > 3).any(-1, keepdim=True), 9.0)  # false
        y = torch.where(chosen[:, 1:] < 4, y, self.unread)  # true, and `unread` has a gradient of zeros
        y = torch.where(chosen[:, 1:].clamp(min=1) == 0, 7.0, y)  # false
        y = y + self.table[number] * (number >= 4).unsqueeze(-1)  # of any number
        return F.mse_loss(y * scores[:, :1], target)


def model() -> nn.Module:
    return Masked()


def batch(batch: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(batch, 6, generator=generator) for _ in range(2))
    return {"x": x, "number": torch.randint(4, (batch,), generator=generator), "target": target}
