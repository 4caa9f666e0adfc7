"""A mixture of experts, every expert weighted, whose router is asked to spread its tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mixture(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(x)
        scores = self.router(h).softmax(-1)
        hidden = F.silu(torch.einsum("btd,edh->bteh", h, self.up))
        y = torch.einsum("bteh,ehd,bte->btd", hidden, self.down, scores)
        # Shazeer et al. 2017 and Fedus et al. 2021, equation 4: the share of tokens times the mean score.
        share = F.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype).mean((0, 1))
        balance = scores.shape[-1] * (share * scores.mean((0, 1))).sum()
        return x + y, balance


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Mixture(16, 4) for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        total = x.new_zeros(())
        for layer in self.layers:
            x, balance = layer(x)
            total = total + balance
        return self.head(x), total


def model() -> nn.Module:
    return Model()


def batch(batch: int = 16) -> dict[str, Tensor]:
    return {"ids": torch.randint(32, (batch, 8)), "labels": torch.randint(32, (batch, 8))}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, balance = model(batch["ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + 0.01 * balance
