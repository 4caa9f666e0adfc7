"""Norms of rows so wide that their derivatives are two kernels, around narrow products."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 5


class Block(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(width)
        self.up = nn.Linear(width, 4)
        self.down = nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(Block(width, norm) for norm in (nn.LayerNorm, nn.RMSNorm, nn.LayerNorm))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(width: int = 9000) -> nn.Module:
    return Wide(width)


def batch(batch: int = 2, seq: int = 3) -> dict[str, Tensor]:
    ids = torch.randint(0, CLASSES, (batch, seq + 1))
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())
