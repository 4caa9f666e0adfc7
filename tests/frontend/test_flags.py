"""Branches on buffers such as `initialized` and on counters, against the eager model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc

WIDTH = 12


class ActNorm(nn.Module):
    """A scale and a shift that the first batch initializes."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        dtype = torch.uint8 if style in ("number", "no number") else torch.bool
        self.first = torch.tensor(0, dtype=dtype)  # the buffer's old value, if forward replaces the buffer
        self.register_buffer("initialized", self.first if style == "replaced" else self.first.clone())
        self.log_scale, self.shift = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first = self.style == "number" and self.initialized.item() == 0
        done = self.initialized.item() if self.style == "item" else self.initialized
        if self.style == "no number":
            first = not self.initialized.item()
        if self.training and (first if self.style in ("number", "no number") else not done):
            with torch.no_grad():
                scale = x.std(0)
                if self.style == "data":
                    self.log_scale.data = -scale.log()
                    self.shift.data = -(x / scale).mean(0)
                    self.initialized.data = torch.tensor(True)
                else:
                    self.log_scale.copy_(-scale.log())
                    self.shift.copy_(-(x / scale).mean(0))
                    if self.style == "replaced":
                        self.initialized = torch.tensor(True)
                    else:
                        self.initialized.fill_(True)
        return x * self.log_scale.exp() + self.shift


class Flow(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(ActNorm(style) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + norm(layer(x).tanh())
        return x.square().mean()


class Codes(nn.Module):
    """Vectors of a codebook. Its constructor decides whether the first batch initializes them, with random numbers."""

    def __init__(self, ready: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.register_buffer("ready", torch.tensor(ready))
        self.register_buffer("codes", torch.linspace(-1, 1, 48).view(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if not self.ready:
            self.codes.copy_(y.detach()[:6] + torch.randn(6, 8, dtype=y.dtype))
            self.ready.fill_(True)
        chosen = F.one_hot(torch.cdist(y, self.codes).argmin(1), 6).to(y)
        with torch.no_grad():
            self.codes.mul_(0.9).add_(chosen.T @ y, alpha=0.1)
        return F.mse_loss(self.down(y + (chosen @ self.codes - y).detach()), x)


class Lagging(nn.Module):
    """A copy of a weight that is renewed in every second step, a falling number, and a flag that is not negated."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("fresh", torch.tensor(True))
        self.register_buffer("heat", torch.tensor(1.0))
        self.register_buffer("late", torch.ones(WIDTH, WIDTH))
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        y = self.up(x)
        if self.steps % 2 == self.odd:
            self.late.copy_(self.up.weight.detach())
        if self.heat > 0.6:
            y = y.tanh()
        self.heat.mul_(0.7)
        if self.fresh:
            y = y * 2
            self.fresh.fill_(False)
        return (y - x @ self.late).square().mean()


class Alternating(nn.Module):
    """Each outcome has operations of its own."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("odd", torch.tensor(odd))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x) if self.odd else self.other(x).tanh()
        self.odd.logical_not_()
        return y.square().mean()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(12, WIDTH)}


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "style", "mesh"),
    [
        (Flow, "data", "dp=3"),
        (Flow, "in place", "pp=2,tp=2"),
        (Flow, "item", "dp=2,tp=2"),
        (Flow, "number", "dp=2"),
        (Flow, "no number", "dp=2"),
        (Flow, "replaced", "dp=2"),
        (Lagging, 0, "dp=2"),
        (Codes, False, "dp=2"),
        (Codes, True, "dp=2,tp=2"),
        (Alternating, False, "dp=2"),
    ],
)
def test_branches_on_flags_train_like_one_device(kind: type[nn.Module], style: Any, mesh: str) -> None:
    """The first step initializes weights or buffers; later steps leave them to the optimizer."""
    found = partc.compile(kind(style), batch(), mesh=mesh, precision="fp64").verify(steps=3)
    assert found.ok, str(found.worst)
    assert len(set(found.losses)) == 3
