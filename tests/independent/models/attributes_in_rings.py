"""Lists and dicts among attributes that contain themselves, are shared, or are shared at many depths."""

from typing import Any

import torch
from torch import Tensor, nn


class Child(nn.Module):
    def __init__(self, parent: "Net", log: list[int]) -> None:
        super().__init__()
        self.parent = [parent]  # in a list, so that the parent is no member
        self.log = log
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(1)
        (parent,) = self.parent
        return self.linear(x).tanh() * parent.tree["own"]["scale"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []
        self.tree: dict[str, Any] = {"scale": torch.full((6,), 1.5), "state": torch.zeros(6)}
        self.tree["own"] = self.tree
        self.ring: list[Any] = [0.5]
        self.ring.append((self.ring, torch.ones(6)))
        self.deep: list[Any] = [1.0]
        for _ in range(40):
            self.deep = [self.deep, self.deep]
        self.children_ = nn.ModuleList(Child(self, self.log) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shared = len(self.log)
        for child in self.children_:
            x = x + child(x)
        shared = len(self.log) - shared  # 3: children append to the list of their parent
        self.tree["state"] = 0.5 * self.tree["own"]["state"] + x.detach().mean(0)
        x = x * self.ring[1][0][1][1] * self.ring[0] + self.tree["state"] * shared
        return nn.functional.cross_entropy(self.head(x), y)


def model() -> nn.Module:
    return Net()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return {"x": torch.randn(24, 6, generator=drawn), "y": torch.randint(3, (24,), generator=drawn)}
