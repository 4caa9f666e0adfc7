"""Clips: convolutions in space and time, factored, pools of three dimensions, an attention over time alone."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(3, 6, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1), bias=False)
        self.norm = nn.BatchNorm3d(6)
        self.time = nn.Conv3d(6, 8, (3, 1, 1), padding=(1, 0, 0), groups=2)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.norm(self.stem(x)))
        h = F.max_pool3d(F.silu(self.time(h)), (1, 2, 2))
        h = F.adaptive_avg_pool3d(h, (4, 1, 1)).flatten(2).transpose(1, 2)
        h = h + self.attend(h, h, h, need_weights=False)[0]
        return F.multi_margin_loss(self.head(h.amax(1)), y)


def model() -> nn.Module:
    return Video()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(16, 3, 4, 8, 8, generator=generator),
        "y": torch.randint(0, 4, (16,), generator=generator),
    }
