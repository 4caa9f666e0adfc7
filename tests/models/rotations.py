"""A transformer whose layers rotate queries and keys in every form, two with angles of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, SIZE, LENGTH = 32, 4, 8, 8


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((neighbours(x[..., :4], cos, sin), x[..., 4:]), -1)


class Layer(nn.Module):
    def __init__(self, rotate: Callable[[Tensor, Tensor, Tensor], Tensor], columns: int, trained: bool = False) -> None:
        super().__init__()
        self.rotate, self.columns = rotate, columns
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.frequencies = nn.Parameter(torch.rand(columns)) if trained else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scale = torch.arange(1, self.columns + 1, device=x.device) / self.columns
        angle = torch.outer(torch.arange(LENGTH, device=x.device), scale).to(x.dtype)
        if self.frequencies is not None:
            angle = angle * self.frequencies
        q, k = (self.rotate(z, angle.cos(), angle.sin()) for z in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def model() -> nn.Module:
    return nn.Sequential(
        Layer(neighbours, SIZE),
        Layer(part, 4),
        Layer(halves, SIZE, trained=True),
        Layer(pairs, SIZE // 2, trained=True),
    )


def batch(batch: int = 8) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, LENGTH, WIDTH), "target": torch.randn(batch, LENGTH, WIDTH)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["target"])
