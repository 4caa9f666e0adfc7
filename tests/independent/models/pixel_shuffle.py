"""Super-resolution by pixel shuffle, with a bilinear skip and an edge-aware loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Finer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1, padding_mode="reflect")
        self.slope = nn.PReLU(6)
        self.second = nn.Conv2d(6, 4, 3, padding=1)

    def forward(self, small: Tensor, large: Tensor) -> Tensor:
        made = F.pixel_shuffle(self.second(self.slope(self.first(small))), 2)
        made = made + F.interpolate(small, scale_factor=2, mode="bilinear", align_corners=False)
        edges = (made.diff(dim=-1) - large.diff(dim=-1)).abs().mean()
        return F.l1_loss(made, large) + 0.1 * edges


def model() -> nn.Module:
    return Finer()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    large = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(step))
    return {"small": F.avg_pool2d(large, 2), "large": large}
