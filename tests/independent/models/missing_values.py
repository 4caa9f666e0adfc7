"""Targets with holes: not-a-number where nothing was measured, means over the rest, indicators as features."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Missing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fill = nn.Parameter(torch.zeros(6))
        self.body, self.head = nn.Linear(12, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        holes = x.isnan()
        x = torch.where(holes, self.fill, x)
        h = F.softsign(self.body(torch.cat([x, holes.to(x.dtype)], 1)))
        out = self.head(h)
        seen = ~torch.isnan(y)
        off = (out - y.nan_to_num(0.0)).abs().where(seen, torch.zeros(()))
        per_column = off.sum(0) / seen.sum(0).clamp(min=1)
        return per_column.mean() + 0.1 * torch.nanmean(torch.where(seen, out, float("nan")).square())


def model() -> nn.Module:
    return Missing()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 6, generator=generator), torch.randn(16, 6, generator=generator)
    return {
        "x": x.masked_fill(torch.rand(16, 6, generator=generator) < 0.3, float("nan")),
        "y": y.masked_fill(torch.rand(16, 6, generator=generator) < 0.3, float("nan")),
    }
