"""A function and a module under torch.compile inside the model, and one that must not be compiled."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.compile
def gate(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.sigmoid(x @ w)


@torch.compiler.disable
def plain(x: Tensor) -> Tensor:
    return x + x.sin()


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.compile(nn.Linear(6, 8), fullgraph=True)
        self.w = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.leave = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.leave(plain(gate(self.enter(x), self.w))), y)


def model() -> nn.Module:
    return Compiled()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
