"""A transformer that draws random numbers in every way: dropouts of three kinds, noise, stochastic depth."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + self.dropout(self.out(heads.transpose(1, 2).reshape(b, t, d)))
        x = x + self.dropout(self.down(self.dropout(F.gelu(self.up(self.norm2(x))))))
        alive = torch.empty_like(x[:, :1, :1]).bernoulli_(0.8) / 0.8  # a row's block counts, or it doesn't
        return x * alive


class Noisy(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.spatial = nn.Dropout1d(0.3)
        self.blocks = nn.ModuleList(Block(16) for _ in range(depth))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(8, 1) + 0.01 * torch.randint(3, (1, 8, 16))
        x = self.spatial(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(depth: int = 3) -> nn.Module:
    return Noisy(depth)


def batch(batch: int = 16) -> dict[str, Tensor]:
    return {"ids": torch.randint(32, (batch, 8)), "labels": torch.randint(32, (batch, 8))}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())
