"""Tensors as plain attributes: tables, random numbers, counts, running means, what forward leaves for the loss."""

import torch
from torch import Tensor, nn


class Part(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        angles = torch.arange(600.0)[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.125])
        self.turns = torch.polar(torch.ones_like(angles), angles)
        self.noise = torch.rand(8)
        self.hook_rate = torch.tensor(0.25 * number)
        self.calls = torch.zeros(())
        self.mean = torch.zeros(8, dtype=torch.float64)
        self.extra = torch.zeros(1)
        self.total = torch.tensor(0.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.no_grad():
            self.calls += 1
        pairs = torch.view_as_complex(h.view(len(x), 6, 4, 2)) * self.turns[: x.shape[1]].to(torch.complex128)
        h = torch.view_as_real(pairs).flatten(2) * self.noise + self.mean / self.calls
        self.mean = self.mean + h.detach().mean((0, 1))
        self.extra = h.square().mean((1, 2))
        self.total = 0.0
        self.total = self.total + h.abs().mean()
        return x + h * self.hook_rate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(number) for number in range(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for part in self.parts:
            h = part(h)
        extras = torch.stack([part.extra.mean() + part.total for part in self.parts])
        return (h - x.roll(1, -1)).square().mean() + 0.1 * extras.sum()


def model() -> nn.Module:
    return Net()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(16, 6, 8, generator=torch.Generator().manual_seed(step))}
