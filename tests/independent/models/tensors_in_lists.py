"""Tensors in lists, dicts, tuples and objects of modules: tables, lists of weights, memories that forward makes anew."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Schedule:
    """A noise schedule, which is no module."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.kept = (1 - torch.arange(1, length + 1) * 0.125).cumprod(0)

    def mixed(self, x: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        kept = self.kept[times % self.length][:, None].to(x.dtype)
        return kept.sqrt() * x + (1 - kept).sqrt() * noise


@dataclass(frozen=True)
class Tables:
    shift: Tensor
    rest: tuple[Tensor, int]


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.tables = [torch.arange(6) * 0.25 * number, torch.ones(6)]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x * self.tables[0]).tanh() * self.tables[1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number) for number in range(4))
        self.scale, self.shift = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))
        self.weights = [self.scale, {"shift": self.shift}]
        self.register_buffer("count", torch.zeros(()))
        self.counts = {"steps": self.count}
        self.schedule = Schedule(4)
        self.tables = Tables(shift=torch.full((6,), 0.5), rest=(torch.ones(6), 3))
        self.last = [torch.zeros(6) for _ in self.blocks]
        self.moving = (torch.zeros(6), [torch.ones(6)])
        self.sums = [torch.zeros(6)]

    def forward(self, x: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        h, new = self.schedule.mixed(x, noise, times), []
        for block, last in zip(self.blocks, self.last, strict=True):
            new.append(h.detach().mean(0))
            h = block(h) + 0.1 * last
        self.last = new
        one, (other,) = self.moving
        self.moving = (other, [0.5 * one + h.detach().mean(0)])
        self.sums[0] += 0.25
        self.counts["steps"] += 1
        h = h * self.weights[0] + self.weights[1]["shift"] + one * self.tables.shift + self.sums[0]
        h = h + self.tables.rest[0] * self.tables.rest[1] * self.counts["steps"]
        return (h - noise).square().mean()


def model() -> nn.Module:
    return Net()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    x, noise = torch.randn(2, 16, 6, generator=drawn)
    return {"x": x, "noise": noise, "times": torch.randint(40, (16,), generator=drawn)}
