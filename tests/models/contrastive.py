"""Two views of each example, which a loss tells from those of all other examples: it couples the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).relu()
        return F.normalize(x, dim=-1)


def model() -> nn.Module:
    return Encoder()


def batch(batch: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, WIDTH, generator=generator)
    return {"left": x, "right": x + torch.randn(batch, WIDTH, generator=generator) / 4}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    left, right = model(batch["left"]), model(batch["right"])
    return F.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))
