"""A recommender with every kind of bag: sums, means, maxima, weights, padding, empty bags, duplicates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH = 37, 4


class Recommender(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        bag = lambda mode, **how: nn.EmbeddingBag(ROWS, WIDTH, mode=mode, **how)  # noqa: E731
        self.tables = nn.ModuleDict(
            {
                "summed": bag("sum", sparse=sparse),
                "weighted": bag("sum", sparse=sparse, padding_idx=0),
                "mean": bag("mean", sparse=sparse, padding_idx=0),
                "most": bag("max", padding_idx=0),
                "users": nn.Embedding(ROWS, WIDTH, sparse=sparse, padding_idx=1),
            }
        )
        self.head = nn.Linear(5 * WIDTH, 1)

    def forward(self, ids: Tensor, weights: Tensor, users: Tensor) -> Tensor:
        t = self.tables
        found = [
            t["summed"](ids),
            t["weighted"](ids, per_sample_weights=weights),
            t["mean"](ids),
            t["most"](ids),
            t["users"](users) + t["users"](ids[:, 0]),
        ]
        return self.head(torch.cat(found, 1).tanh())[:, 0]


def model(sparse: bool = True) -> nn.Module:
    return Recommender(sparse)


def batch(batch: int = 16, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    ids = torch.randint(ROWS, (batch, 3), generator=generator)
    ids[0], ids[1, 1:], ids[2] = 0, 0, 5  # a bag without members, one with a single member, one with duplicates
    weights, users = torch.rand(batch, 3, generator=generator), torch.randint(ROWS, (batch,), generator=generator)
    return {"ids": ids, "weights": weights, "users": users, "target": torch.randn(batch, generator=generator)}


def data(step: int) -> dict[str, Tensor]:
    return batch(generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["ids"], batch["weights"], batch["users"]), batch["target"])
