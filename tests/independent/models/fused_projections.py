"""Fused projections of unequal widths: queries with fewer keys and values, one key for all queries, and the gates, values
and steps of a state space layer behind a convolution.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Grouped(nn.Module):
    """Attention whose queries, keys and values are one projection, taken apart by slices, and an adapter."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size, self.sections = width // heads, (width, groups * width // heads)
        self.qkv = nn.Linear(width, width + 2 * self.sections[1])
        self.down, self.up = nn.Linear(width, 3, bias=False), nn.Linear(3, self.qkv.out_features, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y, (wide, narrow) = self.qkv(x) + self.up(self.down(x)), self.sections
        parts = y[..., :wide], y[..., wide : wide + narrow], y[..., wide + narrow :]
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Shared(nn.Module):
    """Attention with one key and value for all queries, split twice."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.qkv = nn.Linear(width, width + 2 * self.size)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, kv = self.qkv(x).split((x.shape[-1], 2 * self.size), -1)
        k, v = kv.split(self.size, -1)
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        scores = (q @ k.unsqueeze(1).transpose(-1, -2)) * self.size**-0.5
        return self.out((scores.softmax(-1) @ v.unsqueeze(1)).transpose(1, 2).flatten(2))


class States(nn.Module):
    """A state space layer: one projection gives gates, the input of a convolution, and a step for each head."""

    def __init__(self, width: int, heads: int, groups: int, states: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.inner, mixed = (width, groups * states, groups * states), width + 2 * groups * states
        self.into = nn.Linear(width, width + mixed + heads, bias=False)
        self.conv = nn.Conv1d(mixed, mixed, 3, groups=mixed, padding=2)
        self.bias = nn.Parameter(torch.randn(heads))
        self.norm = nn.RMSNorm(width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, y, step = self.into(x).split((x.shape[-1], sum(self.inner), self.heads), -1)
        y = F.silu(self.conv(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        value, b, c = y.split(self.inner, -1)
        value = value.unflatten(-1, (self.heads, -1)) * F.softplus(step + self.bias)[..., None]
        b, c = (each.unflatten(-1, (self.groups, -1)) for each in (b, c))
        b, c = (each.repeat_interleave(self.heads // self.groups, 2) for each in (b, c))
        weights = torch.einsum("blhn,bmhn->bhlm", c, b).tril()
        mixed = torch.einsum("bhlm,bmhp->blhp", weights, value).flatten(2)
        return self.out(self.norm(mixed * F.silu(gate)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 12)
        self.blocks = nn.ModuleList((Grouped(12, 6, 2), Shared(12, 6), States(12, 6, 2, 3), Grouped(12, 4, 2)))
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in self.blocks)
        self.head = nn.Linear(12, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return F.cross_entropy(self.head(x).transpose(1, 2), tokens.roll(-1, 1))


def model() -> nn.Module:
    return Net()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"tokens": torch.randint(0, 12, (12, 8), generator=generator)}
