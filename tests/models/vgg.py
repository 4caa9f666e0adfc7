"""VGG (Simonyan and Zisserman 2014): convolutions with large activations, linear layers with most of the weights.

`-D depth=16 -D image=224 -D width=64 -D hidden=4096` is VGG-16; the defaults are small.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

CONVOLUTIONS = {8: (1, 1, 1), 16: (2, 2, 3, 3, 3)}  # of the stages, by the depth
CLASSES = 1000


class Stage(nn.Module):
    """Convolutions of one width, and a maximum over squares of four pixels."""

    def __init__(self, given: int, width: int, count: int) -> None:
        super().__init__()
        widths = (given, *[width] * count)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.max_pool2d(x, 2)


class Network(nn.Module):
    """The stages, of which each but the last ones doubles the width, and three linear layers."""

    def __init__(self, depth: int, image: int, width: int, hidden: int) -> None:
        super().__init__()
        counts = CONVOLUTIONS[depth]
        widths = (3, *(width * min(2**stage, 8) for stage in range(len(counts))))
        self.stages = nn.ModuleList(map(Stage, widths, widths[1:], counts))
        pixels = widths[-1] * (image // 2 ** len(counts)) ** 2
        self.linears = nn.ModuleList([nn.Linear(pixels, hidden), nn.Linear(hidden, hidden)])
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        x = x.flatten(1)
        for linear in self.linears:
            x = torch.relu(linear(x))
        return self.head(x)


def model(depth: int = 8, image: int = 16, width: int = 4, hidden: int = 32) -> nn.Module:
    return Network(depth, image, width, hidden)


def batch(batch: int = 8, image: int = 16) -> dict[str, Tensor]:
    return {"image": torch.randn(batch, 3, image, image), "label": torch.randint(CLASSES, (batch,))}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"])
