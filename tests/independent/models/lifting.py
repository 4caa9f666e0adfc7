"""A learned wavelet by lifting: even and odd samples predict each other, written into slices of one tensor."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Lifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.predict = nn.ModuleList(nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular") for _ in range(2))
        self.update = nn.ModuleList(nn.Conv1d(2, 2, 3, padding=1, padding_mode="replicate") for _ in range(2))
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(2, 1)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h, details = x, []
        for predict, update, scale in zip(self.predict, self.update, self.scale, strict=True):
            even, odd = h[..., ::2], h[..., 1::2]
            details.append((odd - predict(even)) * scale)
            h = even + update(details[-1])
        out = torch.zeros_like(x)
        rough = F.interpolate(h, scale_factor=4.0, mode="linear")
        out[..., ::2] = rough[..., ::2] * 0.5
        out[..., 1::2] = rough[..., 1::2] + details[0]
        out[:, 0, :2] += 1.0
        out[:, 1] *= 0.9
        sparse = torch.cat([part.flatten(1) for part in details], 1).abs().mean()
        return (out - x).abs().pow(1.5).mean() + 0.1 * sparse


def model() -> nn.Module:
    return Lifting()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 2, 16, generator=generator)}
