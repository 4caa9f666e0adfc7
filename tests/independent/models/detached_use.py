"""A weight that an early layer reads without a gradient, and the loss with one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Binned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.edges = nn.Parameter(torch.linspace(-1, 1, 5))
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        bins = torch.searchsorted(self.edges.detach(), x[:, 0].contiguous())
        return self.leave(torch.tanh(self.enter(x)) * (1 + bins[:, None]))


def model() -> nn.Module:
    return Binned()


def loss(model: Binned, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"]) + 0.01 * model.edges.diff().square().sum()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(16, 6, generator=generator),
        "y": torch.randint(0, 4, (16,), generator=generator),
    }
