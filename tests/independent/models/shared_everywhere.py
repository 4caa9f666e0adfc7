"""One module under three names, one weight in two modules transposed, a buffer shared, lists that nest."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        one = nn.Linear(8, 8)
        self.enter = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.ModuleList([one, nn.LayerNorm(8)]), nn.ModuleList([one, nn.LayerNorm(8)])])
        self.again = one
        self.out = nn.Linear(8, 6, bias=False)
        self.out.weight = nn.Parameter(self.enter.weight.detach().t().clone())
        self.tied = nn.Linear(6, 8, bias=False)
        self.tied.weight = self.enter.weight
        self.register_buffer("scale", torch.tensor([1.0, 0.5]))
        self.blocks.register_buffer("scale", self.scale)
        self.bias = self.enter.bias

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for number, (turn, norm) in enumerate(self.blocks):
            h = norm(turn(h).relu() * self.blocks.scale[number] + h)
        h = self.again(h) + self.tied(x) + self.bias
        return F.mse_loss(self.out(h), x)


def model() -> nn.Module:
    return Shared()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator)}
