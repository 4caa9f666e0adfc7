"""Blocks with something between their parallel layers: of the usual kind, or one that works in one order alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, WORDS = 32, 4, 64


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(WIDTH, -1)
        q, k, v = (each.view(b, s, HEADS, -1).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, WIDTH))
        h = F.gelu(self.up(self.norm2(x)))
        match self.kind:
            case "drop":
                h = F.dropout(h, 0.5, self.training)
            case "rows":
                h = h * torch.arange(1, s + 1, dtype=h.dtype)[:, None]
            case "batch":
                h = h * h.mean(0, keepdim=True)
            case "shift":
                h = h + F.pad(h, (0, 0, 1, 0))[:, :-1]
            case "flat":
                h = (h.reshape(b * s, -1) * 2).reshape(b, s, -1)
            case "scale":
                h = h * torch.linspace(1, 2, h.shape[-1], dtype=h.dtype) + 0.1
            case "halves":
                left, right = h.chunk(2, -1)
                h = torch.cat((left * right.sigmoid(), right), -1)
            case "turned":
                h = (h.transpose(0, 1) * 2).transpose(0, 1)
        return x + self.down(h)


class Words(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model(kind: str = "plain") -> nn.Module:
    return Words(kind)


def batch(batch: int = 6) -> dict[str, Tensor]:
    return {"ids": torch.randint(WORDS, (batch, 16)), "labels": torch.randint(WORDS, (batch, 16))}
