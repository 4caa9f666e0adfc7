"""Parameters that autograd leaves without a gradient, in every way that a model has, and some with zeros."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class Ways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.teacher = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))  # alike, under no_grad
        self.detached = nn.Linear(WIDTH, WIDTH)
        self.chooser = nn.Linear(WIDTH, 3)  # its argmax alone is read
        self.shape_only = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Linear(3, 3)
        self.times_zero = nn.Parameter(torch.ones(WIDTH))  # a gradient of zeros, which decays
        self.rounded = nn.Parameter(torch.full((WIDTH,), 1.3))  # likewise
        self.table = nn.Embedding(16, WIDTH)  # rows that no batch selects decay
        self.cut_off = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))  # likewise
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.both = nn.Linear(WIDTH, WIDTH)  # once under no_grad, once not
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, ids: Tensor, target: Tensor) -> Tensor:
        h = x + self.table(ids)
        for layer in self.student:
            h = layer(h).tanh()
        with torch.no_grad():
            t = x
            for layer in self.teacher:
                t = layer(t).tanh()
            t = self.both(t)
        h = (
            h
            + self.detached(x).detach()
            + torch.ones_like(self.shape_only)
            + self.times_zero * 0
            + self.rounded.round()
        )
        for layer in self.cut_off:
            h = torch.cat([layer(h), h], 1)[:, WIDTH:].sin()
        h = self.both(self.frozen(h)) + F.one_hot(self.chooser(x).argmax(-1), WIDTH)
        return F.mse_loss(self.head(h), target) + 0.1 * F.mse_loss(h, t)


def model() -> nn.Module:
    return Ways()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, WIDTH, generator=draw)
    return {"x": x, "ids": torch.randint(0, 5, (16,), generator=draw), "target": x[:, :4].sin()}
