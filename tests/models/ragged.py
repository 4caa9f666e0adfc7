"""A recommender whose examples have bags of different lengths: ids follow each other, and bags begin at offsets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH, IDS = 37, 4, 40


class Recommender(nn.Module):
    def __init__(self, mode: str, last: bool, sparse: bool) -> None:
        super().__init__()
        how = {"include_last_offset": last, "sparse": sparse and mode != "max"}
        self.words = nn.EmbeddingBag(ROWS, WIDTH, mode=mode, padding_idx=0, **how)
        self.users = nn.EmbeddingBag(ROWS - 7, WIDTH, mode="max" if mode == "max" else "mean", **how)
        self.weighted = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", **(how | {"sparse": sparse}))
        self.bottom, self.top = nn.Linear(3, WIDTH), nn.Linear(4 * WIDTH, 1)

    def forward(self, dense: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        found = [
            self.bottom(dense),
            self.words(ids, offsets),
            self.users(ids % (ROWS - 7), offsets),
            self.weighted(ids, offsets, per_sample_weights=weights),
        ]
        return self.top(torch.cat(found, 1).tanh())[:, 0]


def model(mode: str = "sum", last: int = 0, sparse: int = 0) -> nn.Module:
    return Recommender(mode, bool(last), bool(sparse))


def batch(batch: int = 16, last: int = 0) -> dict[str, Tensor]:
    """Some bags are empty, and some ids are in a bag twice."""
    bounds = torch.sort(torch.randint(IDS, (batch - 1,))).values
    ends = torch.full((1,), IDS)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), bounds, *([ends] if last else [])])
    ids = torch.randint(ROWS, (IDS,))
    ids[1:3], ids[5] = ids[0], 0
    return {
        "dense": torch.randn(batch, 3), "ids": ids, "offsets": offsets, "weights": torch.rand(IDS),
        "target": torch.randn(batch),
    }  # fmt: skip


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(*(batch[name] for name in ("dense", "ids", "offsets", "weights"))), batch["target"])
