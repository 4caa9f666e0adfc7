"""Sets of several sizes: induced attention, masked extremes, and a variance that only members count in."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.points = nn.Parameter(torch.randn(1, 3, 8))
        self.into, self.back = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.out = nn.Linear(24, 2)

    def forward(self, x: Tensor, count: Tensor, y: Tensor) -> Tensor:
        absent = torch.arange(x.shape[1]) >= count[:, None]
        h = self.enter(x).relu()
        p = self.into(self.points.expand(x.shape[0], -1, -1), h, h, key_padding_mask=absent, need_weights=False)[0]
        h = h + self.back(h, p, p, need_weights=False)[0]
        member = (~absent).unsqueeze(-1).to(h.dtype)
        mean = (h * member).sum(1) / member.sum(1)
        spread = ((h - mean.unsqueeze(1)).square() * member).sum(1) / member.sum(1)
        most = h.masked_fill(absent.unsqueeze(-1), float("-inf")).amax(1)
        return F.mse_loss(self.out(torch.cat((mean, spread, most), -1)), y)


def model() -> nn.Module:
    return Sets()


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return dict(
        x=torch.randn(8, 6, 5, generator=g),
        count=torch.randint(1, 7, (8,), generator=g),
        y=torch.randn(8, 2, generator=g),
    )


def batch() -> dict[str, Tensor]:
    return data(0)
