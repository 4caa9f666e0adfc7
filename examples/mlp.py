"""A residual multi-layer perceptron that fits a random function: the smallest model worth cutting."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.down(hidden)


class MLP(nn.Module):
    def __init__(self, inputs: int, width: int, hidden: int, depth: int, outputs: int) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(width: int = 64, hidden: int = 256, depth: int = 4) -> nn.Module:
    return MLP(16, width, hidden, depth, 8)


def batch(batch: int = 32) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, 16), "target": torch.randn(batch, 8)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["target"])
