"""A teacher that forward moves to its student, with a counter and a centre that it reads early and changes late."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 12))


class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = network(), network().requires_grad_(False)
        self.register_buffer("centre", torch.zeros(1, 12))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            given = self.teacher(b)
            temperature = torch.where(self.steps < 2, 0.2, 0.35)
            target = ((given - self.centre) / temperature).softmax(-1)
        loss = -(target * F.log_softmax(self.student(a) / 0.3, -1)).sum(-1).mean()
        with torch.no_grad():
            share = 0.025 * (torch.cos(math.pi * self.steps / 10) + 1)
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.lerp_(new, share)
            self.centre.lerp_(given.mean(0, keepdim=True), 0.1)
            self.steps += 1
        return loss


def model() -> nn.Module:
    return Distilled()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(16, 8, generator=generator) for name in ("a", "b")}
