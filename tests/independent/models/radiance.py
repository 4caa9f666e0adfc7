"""A radiance field: waves of coordinates, densities along a ray, exclusive products, depths drawn by inversion."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3 + 3 * 2 * 3, 16), nn.ReLU(), nn.Linear(16, 4))

    def waves(self, x: Tensor) -> Tensor:
        turned = x[..., None] * 2.0 ** torch.arange(3)
        return torch.cat([x, turned.sin().flatten(-2), turned.cos().flatten(-2)], -1)

    def shine(self, start: Tensor, way: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        raw = self.body(self.waves(start[:, None] + way[:, None] * depth[..., None]))
        gap = torch.cat([depth.diff(dim=-1), torch.full_like(depth[:, :1], 1e2)], -1)
        opaque = 1 - (-F.softplus(raw[..., 3]) * gap).exp()
        clear = torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque + 1e-10], -1).cumprod(-1)[:, :-1]
        weights = opaque * clear
        return (weights[..., None] * raw[..., :3].sigmoid()).sum(1), weights

    def forward(self, start: Tensor, way: Tensor, colour: Tensor) -> Tensor:
        coarse = torch.linspace(0.5, 3.0, 6).expand(start.shape[0], 6)
        first, weights = self.shine(start, way, coarse)
        chance = (weights[:, 1:-1] + 1e-3).detach()
        rising = F.pad((chance / chance.sum(-1, keepdim=True)).cumsum(-1), (1, 0))
        level = torch.linspace(0.05, 0.95, 4).expand(start.shape[0], 4).contiguous()
        above = torch.searchsorted(rising, level, right=True).clamp(1, rising.shape[1] - 1)
        fine = coarse.gather(1, above) + 0.1
        depth, _ = torch.sort(torch.cat([coarse, fine], -1), -1)
        second, _ = self.shine(start, way, depth)
        return F.mse_loss(first, colour) + F.mse_loss(second, colour)


def model() -> nn.Module:
    return Field()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "start": torch.randn(16, 3, generator=generator) * 0.1,
        "way": torch.randn(16, 3, generator=generator),
        "colour": torch.rand(16, 3, generator=generator),
    }
