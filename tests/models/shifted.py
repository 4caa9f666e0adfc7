"""A language model whose loss shifts logits by itself, with smoothing or class weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Bigrams(nn.Module):
    def __init__(self, vocabulary: int, width: int, bias: bool, smoothing: float, weighted: bool) -> None:
        super().__init__()
        self.smoothing, self.weighted = smoothing, weighted
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=bias)
        self.register_buffer("rarity", torch.linspace(0.5, 2, vocabulary))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return self.head(h + self.mix(h).tanh())


def model(
    vocabulary: int = 40, width: int = 16, bias: bool = True, smoothing: float = 0.1, weighted: bool = False
) -> nn.Module:
    return Bigrams(vocabulary, width, bias, smoothing, weighted)


def batch(batch: int = 8, seq: int = 12, vocabulary: int = 40) -> dict[str, Tensor]:
    ids = torch.randint(0, vocabulary, (batch, seq))
    return {"ids": ids, "labels": torch.where(torch.rand(batch, seq) < 0.2, -100, ids)}


def loss(model: Bigrams, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = model(batch["ids"])[:, :-1].contiguous(), batch["labels"][:, 1:]
    weight = model.rarity if model.weighted else None
    return nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), weight=weight, label_smoothing=model.smoothing
    )
