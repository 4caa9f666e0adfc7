"""Layers whose projections are fused and have unequal widths, taken apart in several ways."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, GROUPS, WORDS = 24, 12, 6, 32


class Attention(nn.Module):
    """Queries, and fewer keys and values, from one projection: `how` says how it is taken apart."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.size = how, WIDTH // HEADS
        self.narrow = self.size if how == "one head" else GROUPS * self.size
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * self.narrow)

    def forward(self, x: Tensor) -> Tensor:
        y, k = self.qkv(x), WIDTH + self.narrow
        if self.how == "slices":
            parts = (y[..., :WIDTH], y[..., WIDTH:k], y[..., k:])
        elif self.how == "twice":
            q, both = y.split((WIDTH, 2 * self.narrow), -1)
            parts = (q, *both.chunk(2, -1))
        else:
            parts = y.split((WIDTH, self.narrow, self.narrow), -1)
        heads = [part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts]
        if self.how == "rotary":
            heads[:2] = (_rotated(part) for part in heads[:2])
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)


def _rotated(x: Tensor) -> Tensor:
    """Rotary embeddings of [batch, heads, positions, features]."""
    rates = 0.01 ** torch.linspace(0, 1, x.shape[-1] // 2).repeat(2)
    angles = torch.arange(x.shape[2])[:, None] * rates
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


class States(nn.Module):
    """Gates, values, and a rate for each head from one projection; a convolution precedes the split of the values."""

    def __init__(self) -> None:
        super().__init__()
        self.sections = (WIDTH, GROUPS * 2, GROUPS * 2)
        self.qkv = nn.Linear(WIDTH, WIDTH + sum(self.sections) + HEADS, bias=False)
        self.conv = nn.Conv1d(sum(self.sections), sum(self.sections), 3, groups=sum(self.sections), padding=2)
        self.rate = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        gate, y, rate = self.qkv(x).split((WIDTH, sum(self.sections), HEADS), -1)
        y = F.silu(self.conv(y.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        values, into, out = y.split(self.sections, -1)
        values = values.unflatten(-1, (HEADS, -1)) * F.softplus(rate + self.rate)[..., None]
        into, out = (each.unflatten(-1, (GROUPS, -1)).repeat_interleave(HEADS // GROUPS, 2) for each in (into, out))
        weights = torch.einsum("blhn,bmhn->bhlm", out, into).tril()
        return torch.einsum("bhlm,bmhp->blhp", weights, values).flatten(2) * F.silu(gate)


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = States() if how == "states" else Attention(how)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.mix(self.norm(x)))


class Fused(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(how) for _ in range(2))
        if how == "tied":
            self.blocks[1].mix.qkv.weight = self.blocks[0].mix.qkv.weight
        self.head = nn.Linear(WIDTH, WORDS)
        if how == "read elsewhere":
            self.head = nn.Linear(WIDTH, WIDTH + 2 * self.blocks[0].mix.narrow)
            self.head.weight = self.blocks[0].mix.qkv.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).transpose(1, 2), ids.roll(-1, 1))


def model(how: str = "split") -> nn.Module:
    return Fused(how)


def batch(seq: int = 8) -> dict[str, Tensor]:
    return {"ids": torch.randint(WORDS, (8, seq))}
