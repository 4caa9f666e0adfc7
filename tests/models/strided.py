"""Values that lie strided where torch's kernels want dense memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Normed(nn.Module):
    """Group norms of what is transposed, and of a gradient that is one number repeated."""

    def __init__(self, *, mean: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm = nn.GroupNorm(2, 8)
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x).transpose(1, 2))
        return h.mean() if self.mean else self.down(h.transpose(1, 2)).square().mean()


class Bags(nn.Module):
    """Ids that lie strided in the batch, summed in bags."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(12, 8, mode="mean")
        self.down = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(self.bag(ids.t())).square().mean()


class Volumes(nn.Module):
    """Operations below which torch wants dense memory, of transposed values."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        square = h.reshape(-1, 4, 4).mT + 5 * torch.eye(4)
        pooled = F.adaptive_max_pool3d(h.reshape(-1, 1, 4, 2, 8).transpose(2, 4), (2, 2, 2))
        return torch.logdet(square @ square.mT).mean() + torch.det(square).mean() / 99 + pooled.square().mean()


def model(kind: str = "groups") -> nn.Module:
    return {"groups": Normed(mean=False), "mean": Normed(mean=True), "bags": Bags(), "volumes": Volumes()}[kind]


def batch(kind: str = "groups") -> dict[str, Tensor]:
    if kind == "bags":
        return {"ids": torch.randint(12, (4, 4))}
    return {"x": torch.randn(4, 4 if kind == "volumes" else 3, 6)}
