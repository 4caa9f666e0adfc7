"""A GPT as Megatron-LM trains it: learned positions, layer norms, biases, tied embeddings. All sizes are options.

With `written`, attention is spelled out with dropout, as it ran before there were fused kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KeptMask(nn.Module):
    """A dropout whose mask is a tensor, so that attention stays spelled out."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) >= 0.1) / 0.9


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, written: bool) -> None:
        super().__init__()
        self.heads = heads
        self.drop = KeptMask() if written else None
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, self.heads, 3, -1)
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(3))
        if self.drop is None:
            read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
            read = self.drop(scores.masked_fill(ahead, float("-inf")).softmax(-1)) @ v
        x = x + self.out(read.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, seq: int, vocab: int, written: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, written) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def model(
    layers: int = 4, hidden: int = 64, heads: int = 4, seq: int = 32, vocab: int = 256, written: bool = False
) -> nn.Module:
    return GPT(layers, hidden, heads, seq, vocab, written)


def batch(batch: int = 16, seq: int = 32, vocab: int = 256) -> dict[str, Tensor]:
    tokens = torch.randint(vocab, (batch, seq + 1))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
