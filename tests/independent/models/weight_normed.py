"""Parametrised weights: a norm and a direction, a symmetric and an orthogonal-like one by hand."""

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = weight_norm(nn.Linear(5, 6))
        self.second = nn.Linear(6, 6)
        register_parametrization(self.second, "weight", Symmetric())
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.out(self.second(self.first(x).tanh()).tanh()), x)


def model() -> nn.Module:
    return Normed()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(16, 5, generator=torch.Generator().manual_seed(step))}
