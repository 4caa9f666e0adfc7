"""A few learned latents read a long input by cross-attention, three times with the same weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Cross(nn.Module):
    def __init__(self, width: int, inputs: int) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(width, width), nn.Linear(inputs, 2 * width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        z = z + F.scaled_dot_product_attention(self.q(self.norm(z)), k, v)
        return z + self.mlp(z)


class Perceiver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, 8) * 0.2)
        self.cross, self.own = Cross(8, 4), Cross(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        z = self.latents.expand(x.shape[0], -1, -1)
        for _ in range(3):
            z = self.own(self.cross(z, x), z)
        return F.cross_entropy(self.head(z.mean(1)), label)


def model() -> nn.Module:
    return Perceiver()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 9, 4, generator=draw), "label": torch.randint(0, 5, (16,), generator=draw)}
