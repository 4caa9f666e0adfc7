"""A ladder whose far ends meet: values skip stages, a weight stands at both ends, a layer is used three times.

What the pipeline must carry: activations read by several later stages, an integer mask that owes no
gradient, a value whose gradient nobody needs, and two losses added at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Rung(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x + skip))))


class Ladder(nn.Module):
    def __init__(self, depth: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.shared = nn.Linear(width, width)
        self.into = nn.ModuleList(Rung(width) for _ in range(depth))
        self.out = nn.ModuleList(Rung(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        keep = (ids > 1).unsqueeze(-1)
        first = x = self.embed(ids)
        skips = []
        for rung in self.into:
            x = rung(self.shared(x), first)
            skips.append(x)
        middle = x.detach()
        for rung in self.out:
            x = rung(self.shared(x) * keep, skips.pop())
        return self.head(x + middle), (x - first).square().mean()


def model(depth: int = 3, width: int = 12, vocabulary: int = 20) -> nn.Module:
    return Ladder(depth, width, vocabulary)


def batch(batch: int = 12, seq: int = 5, vocabulary: int = 20) -> dict[str, Tensor]:
    ids = torch.randint(vocabulary, (batch, seq))
    return {"ids": ids, "labels": ids.roll(1, 1).masked_fill(ids % 3 == 0, -100)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, far = model(batch["ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100) + 0.1 * far
