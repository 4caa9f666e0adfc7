"""Modules that TorchScript compiled or traced, with loops and branches of their own, in one stack."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(8, 8)

    def forward(self, x: Tensor, times: int) -> Tensor:
        for i in range(times):
            x = torch.tanh(self.turn(x)) + x
            if i == 1:
                x = x * 0.5
        return x


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 4)
        self.loop = torch.jit.script(Loop())
        self.traced = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.zeros(2, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.leave(self.traced(self.loop(self.enter(x), 3))), y)


def model() -> nn.Module:
    return Scripted()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
