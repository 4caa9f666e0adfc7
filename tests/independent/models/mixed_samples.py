"""Mixed samples: each with the one before it in the batch, with another by a given order, patches pasted by a mask."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 6, 3, padding=1), nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor, share: Tensor, order: Tensor) -> Tensor:
        cut = share.view(-1, 1, 1, 1)
        first = cut * x + (1 - cut) * x.roll(1, 0)
        where = torch.arange(x.shape[-1]) < 2
        second = torch.where(where, x[order], x)
        third = 0.5 * x + 0.5 * x.flip(0)
        scores = [self.head(F.relu(self.conv(each)).mean((2, 3))) for each in (first, second, third)]
        loss = share * F.cross_entropy(scores[0], y, reduction="none")
        loss = loss + (1 - share) * F.cross_entropy(scores[0], y.roll(1, 0), reduction="none")
        return loss.mean() + F.cross_entropy(scores[1], y[order]) + F.cross_entropy(scores[2], torch.flip(y, [0]))


def model() -> nn.Module:
    return Mixed()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(16, 2, 5, 5, generator=generator),
        "y": torch.randint(0, 4, (16,), generator=generator),
        "share": torch.rand(16, generator=generator),
        "order": torch.randperm(16, generator=generator),
    }
