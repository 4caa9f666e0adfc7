"""Complex numbers as pairs of reals: a product of complex matrices, a rotation per channel, magnitudes at the end."""

import torch
from torch import Tensor, nn


class Complex(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.real = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.imaginary = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.angle = nn.Parameter(torch.rand(outputs))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        x = a @ self.real - b @ self.imaginary
        y = a @ self.imaginary + b @ self.real
        cos, sin = self.angle.cos(), self.angle.sin()
        return x * cos - y * sin, x * sin + y * cos


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Complex(6, 8), Complex(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.first(x, torch.zeros_like(x))
        size = torch.hypot(a, b) + 1e-6
        a, b = self.second(a * size.tanh() / size, b * size.tanh() / size)
        return nn.functional.mse_loss(torch.atan2(b, a).sin() + torch.hypot(a, b), y)


def model() -> nn.Module:
    return Waves()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": x[:, :4].abs()}
