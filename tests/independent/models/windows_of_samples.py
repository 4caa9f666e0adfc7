"""Signals in overlapping windows: unfold, a spectrum by torch's transform, wavelets as strided products, differences."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.randn(4, 8) * 0.3)
        self.head = nn.Linear(4 + 5, 4)
        self.register_buffer("hann", torch.hann_window(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        frames = x.unfold(-1, 8, 4)
        own = torch.einsum("btw,kw->btk", frames * self.hann, self.learned).square().mean(1)
        turned = torch.fft.rfft(frames * self.hann, dim=-1)
        power = (turned.real**2 + turned.imag**2 + 1e-6).log().mean(1)
        bend = torch.diff(x, n=2, dim=-1, prepend=x[:, :1]).abs().mean(-1, keepdim=True)
        features = torch.cat([own, power], -1) * torch.rsqrt(bend + 0.1)
        return F.cross_entropy(self.head(features), y) + 0.01 * torch.trapezoid(own, dim=-1).mean()


def model() -> nn.Module:
    return Windows()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 24, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
