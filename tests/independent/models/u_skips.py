"""A ladder in one dimension: down with skips, up with concatenations, batch norms whose statistics train along."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Ladder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv1d(2, 4, 3, padding=1), nn.Conv1d(4, 6, 3, padding=1)
        self.middle = nn.Conv1d(6, 6, 3, padding=1)
        self.up2, self.up1 = nn.Conv1d(12, 4, 3, padding=1), nn.Conv1d(8, 2, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm1d(4), nn.BatchNorm1d(6, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.norm1(self.down1(x)))
        b = F.relu(self.norm2(self.down2(F.max_pool1d(a, 2))))
        m = self.middle(F.avg_pool1d(b, 2))
        h = self.up2(torch.cat([F.interpolate(m, scale_factor=2, mode="nearest"), b], 1))
        h = self.up1(torch.cat([F.interpolate(h, scale_factor=2, mode="nearest"), a], 1))
        return F.mse_loss(h, x.roll(1, -1))


def model() -> nn.Module:
    return Ladder()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(16, 2, 8, generator=torch.Generator().manual_seed(step))}
