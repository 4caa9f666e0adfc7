"""DCN-v2 (Wang et al. 2021): crossed features of tables of several widths, and a deep network in parallel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTHS = (40, 31, 18), (8, 4, 8)


class Cross(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        return first * self.linear(x) + x


class DCN(nn.Module):
    def __init__(self, first: int) -> None:
        super().__init__()
        sizes = zip((first, *ROWS[1:]), WIDTHS, strict=True)
        tables = (nn.Embedding(rows, width, sparse=True) for rows, width in sizes)
        self.tables = nn.ModuleList(tables)
        self.words = nn.EmbeddingBag(25, 8, mode="mean", padding_idx=0, sparse=True)
        width = sum(WIDTHS) + 8 + 4
        self.crosses = nn.ModuleList(Cross(width) for _ in range(3))
        self.deep = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(width + 16, 1)

    def forward(self, dense: Tensor, sparse: Tensor, words: Tensor) -> Tensor:
        found = [table(sparse[:, index] % table.num_embeddings) for index, table in enumerate(self.tables)]
        x = first = torch.cat([dense, self.words(words), *found], 1)
        for cross in self.crosses:
            x = cross(first, x)
        return self.head(torch.cat([x, self.deep(first)], 1)).squeeze(1)


def model(first: int = ROWS[0]) -> nn.Module:
    return DCN(first)


def batch(batch: int = 16, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    return {
        "dense": torch.randn(batch, 4, generator=generator),
        "sparse": torch.stack([torch.randint(rows, (batch,), generator=generator) for rows in ROWS], 1),
        "words": torch.randint(25, (batch, 5), generator=generator),
        "clicked": torch.randint(2, (batch,), generator=generator).float(),
    }


def data(step: int) -> dict[str, Tensor]:
    return batch(generator=torch.Generator().manual_seed(step))


eval_data = [data(1000 + step) for step in range(2)]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["dense"], batch["sparse"], batch["words"])
    return F.binary_cross_entropy_with_logits(scores, batch["clicked"])
