"""Elements of tables by place: take, put, pairs of indices; tables, microbatches and classes have one size."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Places(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.size = size
        self.pairs = nn.Parameter(torch.randn(size, size))
        self.ones = nn.Parameter(torch.randn(size))
        self.line = nn.Linear(size, size)
        self.register_buffer("seen", torch.zeros(size, size))

    def forward(self, x: Tensor, i: Tensor, j: Tensor, label: Tensor) -> Tensor:
        place = i * self.size + j
        h = self.line(x) + self.pairs[i] + (self.ones[j] * self.pairs[i, j] + self.pairs.take(place))[:, None]
        h = h + torch.take(self.ones, j - self.size)[:, None] * self.pairs[:, 1][i, None]
        mixed = self.pairs.put(torch.tensor([[0, 5], [10, 15]]), self.ones, accumulate=True)
        h = h + (x @ mixed).sum(1, keepdim=True) + self.ones.gather(0, i)[:, None]
        self.seen.put_(place, torch.ones(len(i), dtype=x.dtype), accumulate=True)
        first = torch.zeros_like(h)
        first.put_(torch.arange(len(h)) * self.size + i, h[:, 0])
        return F.cross_entropy(h + first, label) + (self.pairs.diagonal()[label] * h.mean(1)).mean()


def model() -> nn.Module:
    return Places()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    numbers = {name: torch.randint(4, (16,), generator=generator) for name in ("i", "j", "label")}
    return {"x": torch.randn(16, 4, generator=generator), **numbers}
