"""Samples attend to each other: attention over the batch, labels of others as values, one's own hidden."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Neighbours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(6, 8), nn.Linear(6, 8)
        self.table, self.head = nn.Embedding(4, 5), nn.Linear(11, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k = self.q(x).view(-1, 2, 4).transpose(0, 1), self.k(x).view(-1, 2, 4).transpose(0, 1)
        alone = torch.eye(x.shape[0], dtype=torch.bool)
        seen = F.scaled_dot_product_attention(q, k, self.table(y).expand(2, -1, -1), attn_mask=~alone)
        return F.cross_entropy(self.head(torch.cat([x, seen.mean(0)], -1)), y)


def model() -> nn.Module:
    return Neighbours()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
