"""A transformer whose blocks are mixtures of experts from the second one on, in the sizes of its options."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, HEADS = 64, 4


class Experts(nn.Module):
    def __init__(self, width: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(rows).softmax(-1).topk(self.chosen, -1)
        out = torch.zeros_like(rows)
        for expert in range(len(self.up)):
            token, slot = torch.where(chosen == expert)
            made = F.silu(rows[token] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, token, made * weights[token, slot, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, width: int, mixer: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        q, k, v = (part(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mixer(self.second(x))


class Routed(nn.Module):
    def __init__(self, width: int, hidden: int, depth: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        mixers = (Experts(width, hidden, experts, chosen) for _ in range(depth))
        self.blocks = nn.ModuleList(Block(width, mixer) for mixer in (dense, *mixers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model(width: int = 16, hidden: int = 24, depth: int = 2, experts: int = 4, chosen: int = 2) -> nn.Module:
    return Routed(width, hidden, depth, experts, chosen)


def batch(batch: int = 8, seq: int = 8) -> dict[str, Tensor]:
    return {"ids": torch.randint(WORDS, (batch, seq)), "labels": torch.randint(WORDS, (batch, seq))}
