"""Two residual blocks and a classifier: small, with the things that go wrong first (biases, norms, ignored labels)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, hidden) for _ in range(2)])
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), labels)


def model(width: int = 6, hidden: int = 10, classes: int = 14) -> nn.Module:
    return Classifier(width, hidden, classes)


def batch(batch: int = 8, width: int = 6, classes: int = 14) -> dict[str, Tensor]:
    labels = torch.randint(classes, (batch,))
    labels[: batch // 4] = -100  # the first rank's first rows: unequal counts
    return {"x": torch.randn(batch, width), "labels": labels}
