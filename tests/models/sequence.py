"""SASRec (Kang and McAuley 2018): attention over a user's items, scored against the next item and one that is not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ITEMS, LENGTH, WIDTH = 200, 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, 4, WIDTH // 4).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.between(x))))


class SASRec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.targets = nn.Embedding(ITEMS, WIDTH, sparse=True)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, seen: Tensor, after: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        x = self.items(seen) + self.positions
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return (x * self.targets(after)).sum(2), (x * self.targets(other)).sum(2)


def model() -> nn.Module:
    return SASRec()


def batch(batch: int = 16) -> dict[str, Tensor]:
    return {name: torch.randint(ITEMS, (batch, LENGTH)) for name in ("seen", "after", "other")}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    right, wrong = model(batch["seen"], batch["after"], batch["other"])
    return F.softplus(-right).mean() + F.softplus(wrong).mean()
