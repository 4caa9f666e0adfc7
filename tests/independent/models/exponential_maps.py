"""Rotations by matrix exponentials of skew weights, orthogonal maps by Cayley's transform, a polynomial basis."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.skew, self.cayley = nn.Parameter(torch.randn(6, 6) * 0.3), nn.Parameter(torch.randn(6, 6) * 0.3)
        self.time = nn.Parameter(torch.tensor([0.5, 1.0, 1.5]))
        self.head = nn.Linear(6 * 4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        skew = self.skew.triu(1) - self.skew.triu(1).t()
        turned = torch.einsum("tij,bj->bti", torch.linalg.matrix_exp(self.time[:, None, None] * skew), x)
        other = self.cayley - self.cayley.T
        whole = torch.linalg.solve(torch.eye(6) + other, torch.eye(6) - other)
        h = (turned.mean(1) @ whole).tanh()
        basis = [torch.ones_like(h), h]
        for _ in range(2, 4):
            basis.append(2 * h * basis[-1] - basis[-2])
        return F.mse_loss(self.head(torch.stack(basis, -1).flatten(1)), y)


def model() -> nn.Module:
    return Maps()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randn(16, 2, generator=generator)}
