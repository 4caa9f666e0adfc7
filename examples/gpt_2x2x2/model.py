"""A Llama-style language model, written as for one device: `partc compile examples/gpt.py --mesh 2x2x2`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of a model: width, blocks, query heads, key and value heads, width of the MLP, tokens."""

    width: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    theta: float = 500_000.0


CONFIGS = {
    "tiny": Config(width=64, depth=4, heads=4, kv_heads=2, hidden=176, vocabulary=256),
    "1b": Config(width=2048, depth=16, heads=32, kv_heads=8, hidden=8192, vocabulary=128_256),
    "8b": Config(width=4096, depth=32, heads=32, kv_heads=8, hidden=14_336, vocabulary=128_256),
    "70b": Config(width=8192, depth=80, heads=64, kv_heads=8, hidden=28_672, vocabulary=128_256),
    "405b": Config(width=16_384, depth=126, heads=128, kv_heads=8, hidden=53_248, vocabulary=128_256),
}


def rotary(length: int, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position's rotation, [length, size]."""
    rate = theta ** (-torch.arange(0, size, 2) / size)
    angle = torch.outer(torch.arange(length), torch.cat([rate, rate]))
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos + turned * sin


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = config.width // config.heads
        self.wq = nn.Linear(config.width, config.heads * self.size, bias=False)
        self.wk = nn.Linear(config.width, config.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(config.width, config.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(config.heads * self.size, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, -1, self.size).transpose(1, 2)
        k = self.wk(x).view(batch, length, -1, self.size).transpose(1, 2)
        v = self.wv(x).view(batch, length, -1, self.size).transpose(1, 2)
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        merged = heads.transpose(1, 2).reshape(batch, length, -1)
        return self.wo(merged)


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate(x)) * self.up(x)
        return self.down(hidden)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, eps=1e-5)
        self.attn = Attention(config)
        self.norm2 = nn.RMSNorm(config.width, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        y = x + self.mlp(self.norm2(x))
        return y


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        config = self.config
        cos, sin = rotary(ids.shape[1], config.width // config.heads, config.theta)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return logits


def model(size: str = "tiny", depth: int = 0) -> nn.Module:
    config = CONFIGS[size]
    return GPT(replace(config, depth=depth or config.depth))


def batch(size: str = "tiny", batch: int = 16, seq: int = 0) -> dict[str, Tensor]:
    """Rows that count up in steps of 1 to 4, and what follows each token; padding at their ends is not learned."""
    seq = seq or (32 if size == "tiny" else 2048)
    first = torch.randint(CONFIGS[size].vocabulary, (batch, 1))
    step = torch.randint(1, 5, (batch, 1))
    tokens = (first + step * torch.arange(seq + 1)) % CONFIGS[size].vocabulary
    filled = torch.randint(seq // 2, seq + 1, (batch, 1))
    labels = tokens[:, 1:].masked_fill(torch.arange(seq) >= filled, -100)
    return {"ids": tokens[:, :-1], "labels": labels}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
