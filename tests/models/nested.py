"""A model whose batch nests dataclasses, mappings of a library's kind, tuples and constants."""

from __future__ import annotations

import enum
from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


class Kind(enum.Enum):
    MEAN = "mean"
    SUM = "sum"


class Encoding(UserDict):  # as transformers' BatchEncoding
    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Targets:
    values: Tensor
    weight: float
    kind: Kind = Kind.MEAN
    note: str | None = None
    made: int = field(default=0, init=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.inner = nn.Linear(16, 24)
        self.head = nn.Linear(24, 5)

    def forward(self, inputs: Encoding, pair: Pair, scale: float, flags: list[bool]) -> Tensor:
        assert isinstance(inputs, Encoding) and isinstance(pair, Pair)
        x = self.embed(inputs.ids) * inputs["mask"].unsqueeze(-1)
        x = torch.tanh(self.inner(x)) * scale + pair.left * pair.right
        return self.head(x) if flags[1] else self.head(x.relu())


def model() -> nn.Module:
    return Net()


def batch(rows: int = 8) -> dict[str, Any]:
    inputs = Encoding({"ids": torch.randint(12, (rows, 6)), "mask": torch.rand(rows, 6)})
    targets = Targets(torch.randint(5, (rows, 6)), weight=0.25)
    return {
        "inputs": inputs,
        "rest": [Pair(torch.randn(rows, 6, 24), torch.randn(rows, 6, 1)), (0.5, [False, True])],
        "targets": {"main": targets, 1: None},
    }


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    pair, (scale, flags) = batch["rest"]
    targets = batch["targets"]["main"]
    assert isinstance(targets, Targets) and targets.kind is Kind.MEAN and batch["targets"][1] is None
    logits = model(batch["inputs"], pair, scale, flags)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.values.flatten()) * targets.weight
