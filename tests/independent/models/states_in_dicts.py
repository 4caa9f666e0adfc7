"""A dict of tensors that all layers share: a running mean, which each layer replaces, and the values of this step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, state: dict[str, Tensor], number: int) -> None:
        super().__init__()
        self.state, self.number = state, number
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x).tanh() + 0.1 * self.state["mean"]
        self.state["mean"] = 0.9 * self.state["mean"] + 0.1 * x.detach().mean(0)
        self.state[f"value {self.number}"] = x
        return x + self.state[f"value {self.number - 1}"] if self.number else x


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"mean": torch.zeros(6)}
        self.layers = nn.ModuleList(Layer(self.state, number) for number in range(3))
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.out(x), y)


def model() -> nn.Module:
    return Stack()


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 6, generator=draw), "y": torch.randn(8, 6, generator=draw)}


def batch() -> dict[str, Tensor]:
    return data(0)
