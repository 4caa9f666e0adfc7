"""Layers on the mean of a batch, which has no rows, and a weight whose only path to the loss has no elements."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class OneVector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 6), nn.Linear(6, 4)
        self.root, self.layer, self.slope = nn.RMSNorm(6), nn.LayerNorm(6), nn.PReLU()
        self.both = nn.Bilinear(6, 6, 6)
        self.before, self.none, self.after = nn.Linear(6, 6), nn.Linear(6, 0), nn.Linear(6, 6)
        self.sign = nn.Parameter(torch.tensor(-0.3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.enter(x)
        mean = rows.mean(0)
        mean = self.root(mean) + self.layer(mean) * self.slope(mean) + self.both(mean, mean)
        mean = mean * torch.copysign(torch.ones(()), self.sign)
        nothing = self.after(self.none(self.before(rows)) @ torch.zeros(0, 6))
        return F.cross_entropy(self.leave(rows + mean + nothing), y)


def model() -> nn.Module:
    return OneVector()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(12, 6, generator=generator), "y": torch.randint(0, 4, (12,), generator=generator)}
