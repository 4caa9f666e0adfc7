"""A frozen trunk with an adapter, buffers, a module in eval mode and a norm's statistics that stand still."""

import torch
from torch import Tensor, nn


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8)).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.still = nn.BatchNorm1d(8).eval()
        self.moving = nn.BatchNorm1d(8)
        self.dropped = nn.Dropout(0.5).eval()
        self.register_buffer("mean", torch.linspace(-1, 1, 6))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False, True, True, True, False]))
        self.register_buffer("passing", torch.ones(6), persistent=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        h = self.trunk((x - self.mean) * self.mask / self.count * self.passing)
        h = self.moving(self.still(h + self.up(self.down(h))).tanh())
        return nn.functional.cross_entropy(self.head(self.dropped(h)), label)


def model() -> nn.Module:
    return Frozen()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=draw), "label": torch.randint(0, 3, (16,), generator=draw)}
