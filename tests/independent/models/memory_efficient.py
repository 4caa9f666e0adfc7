"""Dense blocks under checkpoints, as in memory-efficient DenseNets: backward updates the norms' statistics again."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Layer(nn.Module):
    def __init__(self, width: int, reentrant: bool) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm1d(width), nn.Conv1d(width, 3, 3, padding=1, bias=False)
        self.reentrant = reentrant

    def bottleneck(self, *before: Tensor) -> Tensor:
        h: Tensor = self.conv(F.relu(self.norm(torch.cat(before, 1))))
        return h

    def forward(self, before: list[Tensor]) -> Tensor:
        h: Tensor = checkpoint(self.bottleneck, *before, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return h


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(2, 4, 3, padding=1)
        self.layers = nn.ModuleList(Layer(4 + 3 * count, count == 1) for count in range(3))
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.out = nn.Linear(13, 3)

    def block(self) -> nn.Sequential:
        return nn.Sequential(nn.Conv1d(13, 13, 1, bias=False), nn.BatchNorm1d(13, momentum=None), nn.Tanh())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = [self.stem(x)]
        for layer in self.layers:
            made.append(layer(made))
        h = torch.cat(made, 1)
        for block in self.blocks:
            h = h + checkpoint(block, h, use_reentrant=False)
        h = checkpoint_sequential(list(self.blocks), 2, h, use_reentrant=False)  # type: ignore[assignment]
        return F.cross_entropy(self.out(h.mean(-1)), y)


def model() -> nn.Module:
    return Dense()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(16, 2, 8, generator=generator),
        "y": torch.randint(3, (16,), generator=generator),
    }
