"""A recommender of the size of a CPU: 26 tables, most of the time in lookups and exchanges (Naumov et al. 2019, DLRM)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DLRM(nn.Module):
    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width, sparse=True) for _ in range(tables))
        self.dense = Dense(tables, width)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        vectors = [table(sparse[:, index]) for index, table in enumerate(self.tables)]
        scores: Tensor = self.dense(dense, torch.stack(vectors, 1))
        return scores


class Dense(nn.Module):
    """The dense part that ranks repeat on their parts of the batch: two perceptrons, and products of all pairs of vectors."""

    def __init__(self, tables: int, width: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.cat([x.unsqueeze(1), vectors], 1)
        rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
        products = (vectors @ vectors.mT)[:, rows, columns]
        scores: Tensor = self.top(torch.cat([x, products], 1)).squeeze(1)
        return scores


def model(tables: int = 26, rows: int = 20000, width: int = 64) -> nn.Module:
    return DLRM(tables, rows, width)


def batch(batch: int = 2048, tables: int = 26, rows: int = 20000) -> dict[str, Tensor]:
    return {
        "dense": torch.randn(batch, 13),
        "sparse": torch.randint(rows, (batch, tables)),
        "clicked": torch.randint(2, (batch,)).float(),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["dense"], batch["sparse"])
    return F.binary_cross_entropy_with_logits(scores, batch["clicked"])
