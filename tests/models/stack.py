"""A small stack of blocks between a table and a head: most passes have something to rewrite in it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, inner: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.inner = nn.RMSNorm(4 * width, eps=1e-6) if inner else nn.Identity()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner(F.gelu(self.up(self.norm(x)))))


class Turned(nn.Module):
    """A layer whose weight is stored [in, out]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight + self.bias)


class Stack(nn.Module):
    def __init__(
        self, width: int, depth: int, words: int, turned: bool, masked: bool, grouped: bool, inner: bool
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Turned(width) if turned else Block(width, inner) for _ in range(depth))
        self.masked, self.grouped = masked, grouped
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.masked:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask)[:, 0]
        if self.grouped:  # four query heads, one key and value head
            q, k = x.unflatten(-1, (4, -1)).transpose(1, 2), x[:, None, :, : x.shape[-1] // 4]
            x = F.scaled_dot_product_attention(q, k, k, enable_gqa=True).transpose(1, 2).flatten(2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(
    width: int = 8,
    depth: int = 2,
    words: int = 13,
    turned: bool = False,
    masked: bool = False,
    grouped: bool = False,
    inner: bool = False,
) -> nn.Module:
    return Stack(width, depth, words, turned, masked, grouped, inner)


def batch(batch: int = 8, words: int = 13) -> dict[str, Tensor]:
    return {name: torch.randint(words, (batch, 4)) for name in ("ids", "labels")}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())
