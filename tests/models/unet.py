"""A U-Net: what each level of the way down made is joined to the way up, however many stages lie between."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def double(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(2, after), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = double(3, 8), double(8, 16), double(16, 32)
        self.up2 = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.join2 = double(32, 16)
        self.join1 = double(24, 8)
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.down1(images)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.middle(F.max_pool2d(second, 2))
        x = self.join2(torch.cat([self.up2(x), second], 1))
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        return self.out(self.join1(torch.cat([x, first], 1)))


def model() -> nn.Module:
    return UNet()


def batch(batch: int = 16) -> dict[str, Tensor]:
    return {"images": torch.randn(batch, 3, 8, 8), "labels": torch.randint(4, (batch, 8, 8))}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])
