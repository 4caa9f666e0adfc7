"""A transformer over sequences with one kind of attention: which positions read which depends on the kind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KINDS = (
    "causal",
    "full",
    "window",
    "near",
    "alibi",
    "documents",
    "prefix",
    "latent",
    "dropout",
    "sinks",
    "dropped-sinks",
    "convolution",
    "table",
)


class Attention(nn.Module):
    def __init__(self, width: int, kind: str, heads: int, groups: int) -> None:
        super().__init__()
        self.kind, self.heads, self.groups = kind, heads, groups
        self.size = width // heads
        self.value = 6 if kind == "latent" else self.size
        self.q = nn.Linear(width, heads * self.size)
        self.k = nn.Linear(width, groups * self.size)
        self.v = nn.Linear(width, groups * self.value)
        self.out = nn.Linear(heads * self.value, width)
        self.sinks = nn.Parameter(torch.randn(heads)) if "sinks" in kind else None

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k = (f(x).view(b, s, -1, self.size).transpose(1, 2) for f in (self.q, self.k))
        v = self.v(x).view(b, s, -1, self.value).transpose(1, 2)
        at = torch.arange(s)
        ahead = at[:, None] - at
        mask: Tensor | None = None
        match self.kind:
            case "window":
                mask = (ahead >= 0) & (ahead < 5)
            case "near":
                mask = ahead.abs() < 4
            case "alibi":
                slopes = 2.0 ** -torch.arange(1, self.heads + 1)
                mask = (-slopes[:, None, None] * ahead).masked_fill(ahead < 0, -torch.inf)
            case "documents":
                mask = (documents[:, None, :, None] == documents[:, None, None, :]) & (ahead >= 0)
            case "prefix":
                mask = (ahead >= 0) | (at < 3)
        causal = self.kind in ("causal", "latent", "dropout", "convolution", "table")
        p = 0.1 if self.kind.startswith("drop") else 0.0
        if self.sinks is not None:
            heads = self._with_sinks(q, k, v, (ahead >= 0) & (ahead < 9), self.sinks, p)
        else:
            heads = F.scaled_dot_product_attention(q, k, v, mask, p, causal, enable_gqa=self.groups < self.heads)
        return self.out(heads.transpose(1, 2).flatten(2))

    def _with_sinks(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor, p: float) -> Tensor:
        """gpt-oss's attention: a learned score of each head takes its share of every row's softmax."""
        b, _, s, _ = q.shape
        k, v = (x.repeat_interleave(self.heads // self.groups, 1) for x in (k, v))
        scores = (q @ k.mT * 0.3).masked_fill(~mask, -torch.inf)
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(b, -1, s, -1)], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return F.dropout(scores.softmax(-1)[..., :-1], p, self.training) @ v


class Block(nn.Module):
    def __init__(self, width: int, kind: str, heads: int, groups: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, kind, heads, groups)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1 if kind == "dropout" else 0.0)
        self.near = nn.Conv1d(width, width, 3, padding=2, groups=width) if kind == "convolution" else None

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        if self.near is not None:
            x = x + self.near(x.mT)[..., : x.shape[1]].mT
        x = x + self.attention(self.norm(x), documents)
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Sequences(nn.Module):
    def __init__(self, kind: str, heads: int, groups: int, depth: int, longest: int) -> None:
        super().__init__()
        width = 8 * heads
        self.embed, self.positions = nn.Embedding(32, width), nn.Embedding(longest, width)
        self.table = nn.Parameter(torch.randn(1, longest, width)) if kind == "table" else None
        self.blocks = nn.ModuleList(Block(width, kind, heads, groups) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32)

    def forward(self, ids: Tensor, documents: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        if self.table is not None:
            x = x + self.table
        for block in self.blocks:
            x = block(x, documents)
        return self.head(self.norm(x))


def model(kind: str = "causal", heads: int = 3, groups: int = 1, depth: int = 2, seq: int = 16) -> nn.Module:
    assert kind in KINDS
    return Sequences(kind, heads, groups, depth, seq)


def batch(batch: int = 4, seq: int = 16) -> dict[str, Tensor]:
    return {"ids": torch.randint(32, (batch, seq)), "documents": torch.randint(2, (batch, seq)).cumsum(1)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Every position predicts the next one."""
    logits = model(batch["ids"], batch["documents"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())
