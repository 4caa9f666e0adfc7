"""A Llama as Meta wrote it: queries and keys turn by products of complex numbers, whose table is a buffer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def frequencies(size: int, end: int, theta: float = 10000.0) -> Tensor:
    speeds = 1.0 / (theta ** (torch.arange(0, size, 2)[: size // 2].float() / size))
    angles = torch.outer(torch.arange(end, dtype=torch.float32), speeds)
    return torch.polar(torch.ones_like(angles), angles)


def turned(x: Tensor, freqs: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    freqs = freqs.view(1, x.shape[1], 1, numbers.shape[-1])
    return torch.view_as_real(numbers * freqs).flatten(3)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor, freqs: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.norm1(x)
        q, k, v = (w(normed).view(batch, length, self.heads, -1) for w in (self.wq, self.wk, self.wv))
        q, k, v = (each.transpose(1, 2) for each in (turned(q, freqs), turned(k, freqs), v))
        scores = q @ k.transpose(2, 3) / (width // self.heads) ** 0.5 + mask
        out = scores.softmax(-1) @ v
        x = x + self.wo(out.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Llama(nn.Module):
    def __init__(self, words: int = 24, width: int = 16, heads: int = 2, depth: int = 2, length: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        self.register_buffer("freqs", frequencies(width // heads, 2 * length), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, length = self.tokens(ids), ids.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        for layer in self.layers:
            x = layer(x, self.freqs[:length], mask)
        return self.output(self.norm(x))


def model() -> nn.Module:
    return Llama()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"ids": torch.randint(0, 24, (8, 8), generator=generator)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"])[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())
