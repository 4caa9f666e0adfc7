"""A tree of composed pairs: eight leaves to one root through one module, with a loss at every level."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Linear(3, 6)
        self.compose = nn.Bilinear(6, 6, 6)
        self.score = nn.Linear(6, 4)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        level = self.leaf(x).tanh()
        total = torch.zeros(())
        while level.shape[1] > 1:
            level = self.compose(level[:, 0::2].contiguous(), level[:, 1::2].contiguous()).tanh()
            total = total + F.cross_entropy(self.score(level.mean(1)), label) / level.shape[1]
        return total


def model() -> nn.Module:
    return Tree()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 8, 3, generator=draw), "label": torch.randint(0, 4, (16,), generator=draw)}
