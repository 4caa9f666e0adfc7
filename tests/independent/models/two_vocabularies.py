"""A frozen vocabulary and one of further tokens, whose numbers count from the first one's size: as in Idefics, by indices
and masks, and as torchtune's fused embeddings, by selected and scattered elements.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Assigned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.old, self.new = nn.Embedding(10, 8), nn.Embedding(3, 8)
        self.old.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.where(x >= 10)
        further = self.new(x[places] - 10)
        made = F.embedding(x.masked_fill(x >= 10, 0), self.old.weight)
        made[places] = further
        return made


class Scattered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.old, self.new, self.shift = nn.Embedding(10, 8), nn.Embedding(3, 8), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        first = x < 10
        more = torch.masked_select(x, ~first) - 10
        further = self.new(more) * self.shift[more][:, None]
        made, first = x.new_empty((*x.shape, 8), dtype=further.dtype), first[..., None].expand(*x.shape, 8)
        return made.masked_scatter(first, self.old(torch.masked_select(x, x < 10))).masked_scatter(~first, further)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.assigned, self.scattered, self.out = Assigned(), Scattered(), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.cat([self.assigned(x), self.scattered(x)], -1)
        return F.cross_entropy(self.out(h).flatten(0, 1), y.flatten())


def model() -> nn.Module:
    return Words()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(0, 13, (12, 6), generator=generator)
    return {"x": x, "y": torch.randint(0, 4, (12, 6), generator=generator)}
