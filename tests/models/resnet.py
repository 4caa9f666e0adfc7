"""A residual network with batch norms: stages of basic blocks that halve the image and widen the channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Basic(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Basic(8, 8, 1), Basic(8, 8, 1))
        self.layer2 = nn.Sequential(Basic(8, 16, 2), Basic(16, 16, 1))
        self.fc = nn.Linear(16, 6)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.pool(self.stem(images))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def model() -> nn.Module:
    return ResNet()


def batch(batch: int = 16) -> dict[str, Tensor]:
    return {"images": torch.randn(batch, 3, 16, 16), "labels": torch.randint(6, (batch,))}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])
