"""A Kalman filter with learned dynamics and noise: a matrix is solved in every step."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.eye(4) * 0.9 + torch.randn(4, 4) * 0.05)
        self.c = nn.Parameter(torch.randn(2, 4) * 0.3)
        self.q, self.r = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))
        self.enter = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.enter(x)
        mean, cov = x.new_zeros(x.shape[0], 4), torch.eye(4, dtype=x.dtype).expand(x.shape[0], 4, 4)
        loss = x.new_zeros(())
        for t in range(x.shape[1]):
            mean, cov = mean @ self.a.T, self.a @ cov @ self.a.T + torch.diag(self.q.exp())
            s = self.c @ cov @ self.c.T + torch.diag(self.r.exp())
            miss = seen[:, t] - mean @ self.c.T
            gain = torch.linalg.solve(s, self.c @ cov).mT
            loss = (
                loss + (miss * torch.linalg.solve(s, miss.unsqueeze(-1)).squeeze(-1)).sum(-1).mean() + s.logdet().mean()
            )
            mean, cov = mean + (gain @ miss.unsqueeze(-1)).squeeze(-1), cov - gain @ self.c @ cov
        return loss / x.shape[1]


def model() -> nn.Module:
    return Filter()


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return dict(x=torch.randn(8, 4, 3, generator=g))


def batch() -> dict[str, Tensor]:
    return data(0)
