"""Complex weights, biases and buffers: products, phases, moduli, conjugates, and a complex entry of the batch."""

import torch
from torch import Tensor, nn


class Complex(nn.Module):
    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, width, dtype=torch.cfloat) / 4)
        self.bias = nn.Parameter(torch.randn(width, dtype=torch.cfloat) / 4)
        self.second = nn.Parameter(torch.randn(width, width, dtype=torch.cfloat) / 4)
        self.scale = nn.Parameter(torch.rand(width))
        self.register_buffer("phase", torch.polar(torch.ones(width), torch.arange(width) * 0.3))
        self.head = nn.Linear(3 * width, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.first + self.bias
        h = h * self.phase * torch.exp(1j * self.scale)  # a rotation that is learned
        gate = torch.tanh(h.abs()) * torch.exp(1j * h.angle())
        h = h + torch.einsum("bsi,oi->bso", gate, self.second.conj())
        h = h / (1.5 + h * h.conj()) - 0.1 * h.mean(dim=1, keepdim=True)
        h = torch.where(h.real > 0, h, 0.2 * h)
        return self.head(torch.cat((h.real, h.imag, h.abs().square()), dim=-1))


def model() -> nn.Module:
    return Complex()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.complex(*(torch.randn(8, 5, 6, generator=generator) for _ in range(2)))
    return {"x": x, "y": torch.randn(8, 5, 4, generator=generator)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])
