"""A recommender: many embedding tables, some of them bags, whose vectors meet pair by pair (Naumov et al. 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DLRM(nn.Module):
    def __init__(self, sizes: tuple[int, ...] = (40, 24, 16, 12), width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.bag = nn.EmbeddingBag(20, width, mode="sum")
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        pairs = (len(sizes) + 2) * (len(sizes) + 1) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor, words: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = [x, self.bag(words), *(table(sparse[:, index]) for index, table in enumerate(self.tables))]
        stacked = torch.stack(vectors, 1)
        products = stacked @ stacked.mT
        rows, columns = torch.tril_indices(len(vectors), len(vectors), -1)
        return self.top(torch.cat([x, products[:, rows, columns]], 1)).squeeze(1)


def model() -> nn.Module:
    return DLRM()


def batch(batch: int = 16) -> dict[str, Tensor]:
    return {
        "dense": torch.randn(batch, 5),
        "sparse": torch.stack([torch.randint(size, (batch,)) for size in (40, 24, 16, 12)], 1),
        "words": torch.randint(20, (batch, 6)),
        "clicked": torch.randint(2, (batch,)).float(),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["dense"], batch["sparse"], batch["words"])
    return F.binary_cross_entropy_with_logits(scores, batch["clicked"])
