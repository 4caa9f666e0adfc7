"""Losses that compute with the number of rows that a mask selects: `-D style=` says how."""

from __future__ import annotations

import math
import operator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


def counted(style: str, x: Tensor, mask: Tensor) -> Tensor:
    """A loss of the rows `x[mask]`, with the number of rows as a Python number."""
    rows = x[mask]
    total, number = rows.square().sum(), rows.shape[0]
    match style:
        case "length":
            return total / len(rows)
        case "at least one":
            return total / max(1, len(rows))
        case "item":
            return total / max(mask.sum().item(), 1)
        case "tensor and number":
            return total / max(mask.sum(), 1)
        case "elements":
            return total / rows.numel() + total / math.prod(rows.shape)
        case "unpacked":
            number, width = rows.size()
            return total / (number * width)
        case "bytes":
            return total / (rows.nbytes // 8)
        case "others":
            return x[~mask].sum() / (len(x) - number)
        case "root":
            return total / number**0.5 - number + (1 - number / len(x))
        case "as a tensor":
            return total / torch.tensor(number)
        case "ones":
            return torch.ones(number).sum() * x.mean() + rows.new_full((number, 2), 0.5).sum()
        case "zeros":
            return F.binary_cross_entropy_with_logits(rows[:, 0], torch.zeros(number).to(rows))
        case "expanded":
            return (rows - x[0].expand(number, -1)).square().mean()
        case "expanded as":
            return (rows - x[0].expand_as(rows) * x[:1].expand_as(rows)).square().mean()
        case "repeated rows":
            return (rows - x[0].repeat(number, 1) * x[:1].tile((len(rows), 1))).square().mean()
        case "viewed":
            return rows.reshape(number, 2, WIDTH // 2).square().mean()
        case "kind":
            plain = type(number) is int and isinstance(number, int) and number.__class__ is int
            return total / number if plain and isinstance(type(x), type) else total * 100
        case "shape's elements":
            return total / rows.shape.numel()
        case "integer":
            return total / int(mask.sum())
        case "floating":
            return total / float(mask.sum())
        case "range":
            return sum((x.sum() * 0.1 for _ in range(number)), x.sum())
        case "list":
            return x.mean() * [0.5 * i for i in range(1000)][number]
        case "text":
            return x.sum() * float(f"{number}")
        case "product":
            return total * (0.5 * number)
        case "slice":
            return x[:number].sum()
        case "half":
            return x[: number // 2].sum()
        case "filled":
            return torch.zeros(3).fill_(number).sum() * x.mean()
        case "full":
            return torch.full((), number) * x.mean()
        case "clamped":
            return (x * 10).clamp(max=number).sum()
        case "identity":
            return torch.eye(number).sum() * x.mean()
        case "repeated":
            return x[0].repeat(number).sum()
        case "more than three":
            return total if len(rows) > 3 else x.sum()
        case "as many":
            return total * (2.0 if len(rows) == len(x) else 1.0)
        case "as many as others":
            return total * (2.0 if number == x[~mask].shape[0] else 1.0)
        case "threshold":
            return total if int(mask.sum()) > 4 else x.sum()
        case "band":
            return total if 6 <= operator.index(number) <= 10 else x.sum()
        case "bits":
            return total if number.bit_length() > 3 else x.sum()
        case "a step of many":
            return sum((x.sum() for step in range(number) if step == 5), total)
        case "key":
            return total * {16: 1.0}.get(hash(number), 2.0)
    raise ValueError(style)


class Model(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return counted(self.style, self.body(x), labels > 3)


def model(style: str = "length") -> nn.Module:
    return Model(style)


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(16, WIDTH), "labels": torch.randint(8, (16,))}
