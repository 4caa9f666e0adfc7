"""A pointer network: additive attention over the input as the output's distribution, masked where it has been."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Pointer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(2, 8)
        self.query, self.key = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.score = nn.Parameter(torch.randn(8) * 0.5)
        self.start = nn.Parameter(torch.zeros(8))

    def forward(self, points: Tensor, order: Tensor) -> Tensor:
        h = self.encode(points).tanh()
        state = self.start + h.mean(1)
        been = torch.zeros(points.shape[:2])
        total = torch.zeros(points.shape[0])
        for t in range(points.shape[1]):
            scores = torch.tanh(self.query(state).unsqueeze(1) + self.key(h)) @ self.score
            scores = scores.masked_fill(been > 0, -1e4)
            total = total + F.cross_entropy(scores, order[:, t], reduction="none")
            now = F.one_hot(order[:, t], points.shape[1]).to(h.dtype)
            been = been + now
            state = (h * now.unsqueeze(-1)).sum(1)
        return total.mean()


def model() -> nn.Module:
    return Pointer()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    points = torch.rand(16, 5, 2, generator=torch.Generator().manual_seed(step))
    return {"points": points, "order": points.sum(-1).argsort(-1)}
