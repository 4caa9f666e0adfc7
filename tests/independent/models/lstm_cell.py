"""An LSTM spelled out: four gates from one product, unrolled in Python, its weights used at every step."""

import torch
from torch import Tensor, nn


class Cell(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(inputs + width, 4 * width)
        self.peephole = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = self.gates(torch.cat([x, h], -1)).chunk(4, -1)
        c = torch.sigmoid(f + self.peephole * c) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell(3, 6)
        self.start = nn.Parameter(torch.zeros(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.start.expand(x.shape[0], -1)
        c = torch.zeros_like(h)
        total = 0.0
        for t in range(4):
            h, c = self.cell(x[:, t], h, c)
            total = total + nn.functional.mse_loss(self.head(h), x[:, t + 1])
        return total / 4


def model() -> nn.Module:
    return Unrolled()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(16, 5, 3, generator=torch.Generator().manual_seed(step)).cumsum(1)}
