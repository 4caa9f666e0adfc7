"""Inverted residuals: pointwise up, depthwise, squeeze and excite, pointwise down, hardswish between."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Inverted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Conv2d(width, 2 * width, 1)
        self.depthwise = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)
        self.squeeze, self.excite = nn.Linear(2 * width, 2), nn.Linear(2, 2 * width)
        self.down = nn.Conv2d(2 * width, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.hardswish(self.depthwise(F.hardswish(self.up(x))))
        gate = F.hardsigmoid(self.excite(F.relu6(self.squeeze(h.mean((2, 3))))))
        return x + self.down(h * gate[:, :, None, None])


class Mobile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Inverted(6) for _ in range(2)))
        self.head = nn.Linear(6, 4)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.blocks(self.stem(image)), 1).flatten(1)
        return F.nll_loss(F.log_softmax(self.head(x), -1), label)


def model() -> nn.Module:
    return Mobile()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"image": torch.randn(16, 3, 8, 8, generator=draw), "label": torch.randint(0, 4, (16,), generator=draw)}
