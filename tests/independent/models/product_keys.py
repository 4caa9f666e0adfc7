"""A product-key memory: the best pairs of two halves' keys, a weighted bag of values."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 2 * 2 * 6)
        self.keys = nn.Parameter(torch.randn(2, 2, 5, 6) * 0.4)
        self.values = nn.EmbeddingBag(25, 8, mode="sum")
        self.norm = nn.BatchNorm1d(24)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q = self.norm(self.query(x)).view(-1, 2, 2, 6)
        scores = torch.einsum("bhpd,hpkd->bhpk", q, self.keys)
        best, at = scores.topk(3, dim=-1)
        pairs = (best[:, :, 0, :, None] + best[:, :, 1, None, :]).flatten(2)
        places = (at[:, :, 0, :, None] * 5 + at[:, :, 1, None, :]).flatten(2)
        chosen, among = pairs.topk(4, dim=-1)
        rows = places.gather(-1, among)
        weights = chosen.softmax(-1)
        read = self.values(rows.view(-1, 8), per_sample_weights=weights.view(-1, 8))
        return F.cross_entropy(self.out(read + x), y, label_smoothing=0.1)


def model() -> nn.Module:
    return Memory()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 8, generator=generator), "y": torch.randint(0, 3, (16,), generator=generator)}
