"""Attention in shifted windows of a picture: rolls, a table of relative biases, a mask as a buffer, merged patches."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Window(nn.Module):
    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)
        self.bias = nn.Parameter(torch.randn(9, 2) * 0.3)
        places = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        distance = places[:, :, None] - places[:, None, :] + 1
        self.register_buffer("index", distance[0] * 3 + distance[1], persistent=False)
        part = torch.zeros(1, 4, 4, 1)
        if shift:
            for number, rows in enumerate((slice(0, -2), slice(-2, -1), slice(-1, None))):
                for other, columns in enumerate((slice(0, -2), slice(-2, -1), slice(-1, None))):
                    part[:, rows, columns] = number * 3 + other
        windows = self.windows(part).squeeze(-1)
        apart = windows[:, None, :] != windows[:, :, None]
        self.register_buffer("mask", torch.zeros(apart.shape).masked_fill(apart, -100.0))

    @staticmethod
    def windows(x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        return x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        h = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2)) if self.shift else self.norm(x)
        cut = self.windows(h)
        q, k, v = self.qkv(cut).reshape(-1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) / 2 + self.bias[self.index.flatten()].view(4, 4, 2).permute(2, 0, 1)
        scores = (scores.view(b, 4, 2, 4, 4) + self.mask[None, :, None]).view(-1, 2, 4, 4)
        h = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 4, 8))
        h = h.view(b, 2, 2, 2, 2, 8).permute(0, 1, 3, 2, 4, 5).reshape(b, 4, 4, 8)
        return x + (torch.roll(h, (self.shift, self.shift), (1, 2)) if self.shift else h)


class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 2, 2)
        self.blocks = nn.ModuleList([Window(0), Window(1)])
        self.merge = nn.Linear(32, 16, bias=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.patch(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            h = block(h)
        h = torch.cat([h[:, 0::2, 0::2], h[:, 1::2, 0::2], h[:, 0::2, 1::2], h[:, 1::2, 1::2]], -1)
        return F.cross_entropy(self.head(self.merge(h).mean((1, 2))), y)


def model() -> nn.Module:
    return Windows()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 3, 8, 8, generator=generator), "y": torch.randint(0, 5, (16,), generator=generator)}
