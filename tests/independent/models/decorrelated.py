"""Two views whose features shall agree, vary and not correlate: covariances over the batch, off-diagonals by views."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Decorrelated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 5))
        self.norm = nn.BatchNorm1d(5, affine=False)

    @staticmethod
    def apart(square: Tensor) -> Tensor:
        return square.flatten()[:-1].view(4, 6)[:, 1:].flatten()

    def forward(self, x: Tensor, view: Tensor) -> Tensor:
        a, b = self.body(x), self.body(view)
        spread = torch.sqrt(a.var(dim=0) + 1e-4), torch.sqrt(b.var(dim=0) + 1e-4)
        vary = sum(F.relu(1 - part).mean() for part in spread)
        centred = a - a.mean(dim=0)
        covariance = centred.T @ centred / (x.shape[0] - 1)
        cross = self.norm(a).T @ self.norm(b) / len(x)
        on = torch.diagonal(cross).add(-1).pow(2).sum()
        return (
            F.mse_loss(a, b)
            + vary
            + self.apart(covariance).square().sum() / 5
            + on
            + 0.01 * self.apart(cross).square().sum()
        )


def model() -> nn.Module:
    return Decorrelated()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=generator)
    return {"x": x, "view": x + 0.2 * torch.randn(16, 6, generator=generator)}
