"""A tied autoencoder: what decodes is the transpose of what encodes, with biases of its own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 8), nn.Linear(8, 4)
        self.back2, self.back1 = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        code = self.second(self.first(x).sigmoid()).sigmoid()
        h = F.linear(code, self.second.weight.t(), self.back2).sigmoid()
        again = F.linear(h, self.first.weight.t(), self.back1)
        rare = 0.05
        used = code.mean(0)
        sparse = (rare * (rare / used).log() + (1 - rare) * ((1 - rare) / (1 - used)).log()).sum()
        return F.mse_loss(again, x) + 0.01 * sparse


def model() -> nn.Module:
    return Tied()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(16, 10, generator=torch.Generator().manual_seed(step))}
