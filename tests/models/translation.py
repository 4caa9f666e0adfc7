"""An encoder and a decoder: the decoder's blocks all read what the encoder made; one embedding for both."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, causal: bool) -> Tensor:
        q, k, v = self.query(x), self.key(memory), self.value(memory)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Encode(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, False)
        return x + self.mlp(self.norm2(x))


class Decode(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.own, self.cross = Attention(width, heads), Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.own(h, h, True)
        x = x + self.cross(self.norm2(x), memory, False)
        return x + self.mlp(self.norm3(x))


class Translation(nn.Module):
    def __init__(self, width: int, depth: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.encoder = nn.ModuleList(Encode(width, 4) for _ in range(depth))
        self.decoder = nn.ModuleList(Decode(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.embed(source)
        for block in self.encoder:
            memory = block(memory)
        x = self.embed(target)
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


def model(width: int = 16, depth: int = 2, words: int = 32) -> nn.Module:
    return Translation(width, depth, words)


def batch(batch: int = 16) -> dict[str, Tensor]:
    return {name: torch.randint(32, (batch, length)) for name, length in (("source", 8), ("target", 6), ("labels", 6))}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["source"], batch["target"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
