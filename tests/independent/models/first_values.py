"""Attributes that the first step sets: running means, a memory of the last batch, scales that follow its statistics."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Scale(nn.Module):
    """The first batch decides about scales and biases, which are trained afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.scale, self.ready = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.bias.data.copy_(-x.mean(0))
                self.scale.data.copy_(1 / (x.std(0) + 1e-2))
            self.ready = True
        return (x + self.bias) * self.scale


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.register_buffer("mean", None)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x).tanh()
        if self.mean is None:
            self.mean = torch.zeros(6)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        if self.last is not None:
            y = y + 0.1 * self.last
        self.last = y.detach()[:1]
        if not hasattr(self, "power"):
            self.power = y.new_ones(())
        self.power.mul_(0.5).add_(y.detach().square().mean())
        return x + (y - self.mean) / self.power.sqrt()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scale(), Centred(), Centred(), Scale()])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), y)


def model() -> nn.Module:
    return Stack()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=draw) * 2 + 1, "y": torch.randint(0, 3, (16,), generator=draw)}
