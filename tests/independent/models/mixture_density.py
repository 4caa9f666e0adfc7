"""A mixture density network: weights, means and spreads of three Gaussians a sample."""

import math

import torch
from torch import Tensor, nn


class Densities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
        self.weights, self.means, self.spreads = (nn.Linear(12, 3) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.body(x)
        spread = nn.functional.softplus(self.spreads(h)) + 1e-2
        each = -0.5 * ((y - self.means(h)) / spread).square() - spread.log() - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(self.weights(h).log_softmax(-1) + each, -1).mean()


def model() -> nn.Module:
    return Densities()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": x.sum(-1, keepdim=True).sin()}
