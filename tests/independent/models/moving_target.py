"""A target network whose buffers follow in forward, under no_grad, and a predictor that chases it."""

import torch
from torch import Tensor, nn


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(6, 8)
        self.predictor = nn.Linear(8, 4)
        self.target = nn.Linear(6, 4)
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        made = self.predictor(self.online(x).relu())
        with torch.no_grad():
            wanted = self.target(x) - self.centre
            self.centre.mul_(0.9).add_(wanted.mean(0), alpha=0.1)
            self.seen.add_(1)
        return 2 - 2 * nn.functional.cosine_similarity(made, wanted, dim=-1).mean()


def model() -> nn.Module:
    return Moving()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(16, 6, generator=torch.Generator().manual_seed(step))}
