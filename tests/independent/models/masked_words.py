"""A masked language model: a loss over the masked words alone, with smoothing, a penalty on normalisers and tied words."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(13, 8), nn.Embedding(6, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
        self.bias = nn.Parameter(torch.zeros(13))

    def forward(self, ids: Tensor, masked: Tensor) -> Tensor:
        x = self.words(ids.masked_fill(masked, 12)) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.head(x), self.words.weight, self.bias)
        labels = ids.masked_fill(~masked, -100)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        z = logits.logsumexp(-1).square()
        return loss + 1e-3 * (z * masked).sum() / masked.sum().clamp(min=1)


def model() -> nn.Module:
    return Masked()


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return dict(ids=torch.randint(12, (8, 6), generator=g), masked=torch.rand(8, 6, generator=g) < 0.3)


def batch() -> dict[str, Tensor]:
    return data(0)
