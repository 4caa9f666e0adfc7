"""A GPT whose block is the one that Korthikanti et al. 2022 count: scores spelled out, masks of dropouts kept."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class KeptMask(nn.Module):
    """A dropout whose mask is a tensor, of a byte an element."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand_like(x) >= self.p
        return x * keep / (1 - self.p)


class Block(nn.Module):
    def __init__(self, h: int, a: int, drop: type[nn.Module], fused: bool) -> None:
        super().__init__()
        self.a, self.fused = a, fused
        self.ln1, self.ln2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.q, self.k, self.v, self.proj = (nn.Linear(h, h) for _ in range(4))
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        self.drop, self.d1, self.d2 = drop(0.1), drop(0.1), drop(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        y = self.ln1(x)
        q, k, v = (part(y).view(b, s, self.a, h // self.a).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.fused:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) * (h // self.a) ** -0.5
            scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(), float("-inf"))
            o = self.drop(scores.softmax(-1)) @ v
        x = x + self.d1(self.proj(o.transpose(1, 2).reshape(b, s, h)))
        return x + self.d2(self.down(F.gelu(self.up(self.ln2(x)))))


class GPT(nn.Module):
    def __init__(self, h: int, a: int, depth: int, v: int, s: int, drop: type[nn.Module], fused: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(v, h)
        self.places = nn.Parameter(torch.randn(s, h))
        self.blocks = nn.ModuleList(Block(h, a, drop, fused) for _ in range(depth))
        self.norm = nn.LayerNorm(h)
        self.head = nn.Linear(h, v, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model(
    h: int = 64, a: int = 4, depth: int = 2, v: int = 96, s: int = 32, keep: bool = True, fused: bool = False
) -> nn.Module:
    return GPT(h, a, depth, v, s, KeptMask if keep else nn.Dropout, fused)


def batch(b: int = 16, s: int = 32, v: int = 96) -> dict[str, Tensor]:
    ids = torch.randint(v, (b, s + 1))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())
