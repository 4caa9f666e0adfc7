"""Sequences packed of several documents, whose bounds the batch has as `cu_seqlens`: no position reads another document."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

WIDTH, HEADS, WORDS = 24, 3, 32


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bounds: Tensor, mask: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (each.view(b, t, HEADS, -1) for each in self.qkv(self.norm(x)).chunk(3, -1))
        if self.how == "kernel":
            rows = (each.flatten(0, 1) for each in (q, k, v))
            return x + self.out(varlen_attn(*rows, bounds, bounds, t, t, window_size=(-1, 0)).view(b, t, -1))
        heads = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return x + self.out(heads.transpose(1, 2).flatten(2))


class Packed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(how) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, bounds: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])
        document = torch.searchsorted(bounds, at, right=True) - 1
        rate = torch.arange(1, WIDTH + 1) / WIDTH
        x = self.embed(ids) + torch.outer(at - bounds[document], rate).sin().to(self.embed.weight.dtype)
        mask = (document[:, None] == document) & (at[:, None] >= at)
        for block in self.blocks:
            x = block(x, bounds, mask)
        return self.head(x)


def model(how: str = "mask") -> nn.Module:
    return Packed(how)


def batch(seq: int = 16) -> dict[str, Tensor]:
    return {"ids": torch.randint(WORDS, (4, seq)), "bounds": torch.tensor([0, 5, 9, seq], dtype=torch.int32)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Every position predicts the next one, but the last of a document."""
    ids, last = batch["ids"], batch["bounds"][1:].long() - 1
    labels = ids.roll(-1, 1).index_fill(1, last, -100)
    return F.cross_entropy(model(ids, batch["bounds"]).flatten(0, 1), labels.flatten())
