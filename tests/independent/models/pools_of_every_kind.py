"""Pools and resizes of every kind: maxima with places and back, averages without padding, adaptive, area, trilinear."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = (
            nn.Conv2d(2, 8, 3, padding=1),
            nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1, groups=2),
        )
        self.head = nn.Linear(4 + 8 + 2, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.glu(torch.cat([self.conv(x), self.conv(x.flip(2))], 1), 1)
        small, places = F.max_pool2d(h, 2, return_indices=True)
        back = F.max_unpool2d(small, places, 2)
        even = F.avg_pool2d(h + back, 3, stride=2, padding=1, count_include_pad=False)
        most = F.adaptive_max_pool2d(even, (2, 1))
        wide = F.pixel_unshuffle(F.interpolate(self.up(small), size=(8, 8), mode="area"), 2)
        wide = F.interpolate(wide.unsqueeze(2), size=(2, 3, 3), mode="trilinear", align_corners=False)
        third = F.interpolate(x, scale_factor=0.5, mode="bicubic", align_corners=False, antialias=True)
        got = [wide.mean((2, 3, 4)).view(-1, 4, 4).mean(2), most.flatten(1)[:, ::2], third.amax((2, 3))]
        return F.cross_entropy(self.head(torch.cat(got, 1)), y)


def model() -> nn.Module:
    return Pools()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 2, 8, 8, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
