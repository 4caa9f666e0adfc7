"""Scripted, compiled and partial functions, cached properties, default arguments, records and tuples between modules."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn


@torch.jit.script
def swish(x: Tensor, scale: float) -> Tensor:
    return x * torch.sigmoid(scale * x)


class Out(NamedTuple):
    hidden: Tensor
    extra: Tensor | None = None


@dataclass
class Record:
    value: Tensor
    weights: dict[str, Tensor]


class Inner(nn.Module):
    def __init__(self, width: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.act = nn.LazyLinear(width), act
        self.linear(torch.zeros(1, 6))

    def forward(self, x: Tensor, *more: Tensor, scale: float = 1.0, **other: Tensor) -> Out:
        h = self.act(self.linear(x)) * scale
        for each in more:
            h = h + each.mean()
        return Out(h, other.get("side"))


class Dressed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner(8, partial(swish, scale=1.5))
        self.other = Inner(8, torch.nn.functional.silu)
        self.head = nn.Sequential(OrderedDict(drop=nn.Dropout(0.0), same=nn.Identity(), out=nn.Linear(8, 4)))

    @cached_property
    def scale(self) -> float:
        return 0.5 + len(list(self.parameters())) / 10

    def forward(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        first = self.inner(x, x[:, 0], scale=self.scale, side=x[:, 1:2])
        second = self.other(x)
        record = Record(first.hidden + second.hidden, {"side": first.extra})
        assert second.extra is None and mask is None
        return torch.nn.functional.cross_entropy(self.head(record.value * record.weights["side"].cos()), y)


def model() -> nn.Module:
    return Dressed()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
