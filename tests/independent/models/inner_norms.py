"""Norms of whole queries, keys and hidden values, with and without weights: tensor parallelism cuts their rows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.queries, self.keys = nn.RMSNorm(width), nn.LayerNorm(width)
        self.values = nn.RMSNorm(width, elementwise_affine=False)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.before, self.hidden = nn.LayerNorm(width), nn.LayerNorm(2 * width, elementwise_affine=False)
        self.bias = nn.Parameter(torch.randn(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        norms = self.queries, self.keys, self.values
        q, k, v = (norm(layer(x)).unflatten(-1, (self.heads, -1)) for norm, layer in zip(norms, self.qkv, strict=True))
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.hidden(F.silu(self.up(self.before(x)))) + self.bias)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Block(8, 4) for _ in range(2))
        self.head = nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).transpose(1, 2), tokens.roll(-1, 1))


def model() -> nn.Module:
    return Net()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"tokens": torch.randint(0, 12, (16, 8), generator=generator)}
