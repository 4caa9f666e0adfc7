"""Bags of words in every mode: sums, means and maxima of rows, a padding row, weights by sample, a norm of rows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(30, 8, mode="mean", padding_idx=0)
        self.most = nn.EmbeddingBag(30, 8, mode="max")
        self.sum = nn.EmbeddingBag(30, 8, mode="sum")
        self.rows = nn.Embedding(30, 8, padding_idx=0)
        self.out = nn.Linear(32, 1)

    def forward(self, words: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        apart = self.rows(words)
        known = (words != 0).unsqueeze(-1)
        read = [
            self.mean(words),
            self.most(words),
            self.sum(words, per_sample_weights=weights.softmax(-1)),
            (apart * known).sum(1) / known.sum(1).clamp(min=1),
        ]
        return F.binary_cross_entropy_with_logits(
            self.out(torch.cat(read, -1)).squeeze(-1), y, pos_weight=torch.tensor(2.0)
        )


def model() -> nn.Module:
    return Bags()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "words": torch.randint(0, 30, (16, 6), generator=generator),
        "weights": torch.randn(16, 6, generator=generator),
        "y": torch.randint(0, 2, (16,), generator=generator).float(),
    }
