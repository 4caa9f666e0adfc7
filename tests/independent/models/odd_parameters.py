"""Parameters of many ranks and strides: five dimensions, transposed and expanded in memory, and integers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.five = nn.Parameter(torch.randn(2, 1, 3, 2, 4) * 0.3)
        self.turned = nn.Parameter((torch.randn(8, 6) * 0.3).t())
        self.cut = nn.Parameter((torch.randn(8, 8) * 0.3)[::2, 1:5])
        self.register_buffer("spread", torch.rand(1, 4).expand(8, 4))
        self.register_buffer("places", torch.tensor([3, 1, 0, 2], dtype=torch.int32), persistent=False)
        self.register_buffer("short", torch.rand(4).to(torch.float16))
        self.one = nn.Parameter(torch.tensor([[[1.5]]]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = (x @ self.turned).view(-1, 2, 4)
        h = torch.einsum("bij,iaklj->bakl", h, self.five).flatten(1)
        h = h[:, :4] * self.one.squeeze() + h[:, 2:] @ self.cut
        h = h[:, self.places.long()] * self.spread[0] + self.short.to(h.dtype)
        return F.cross_entropy(h, y)


def model() -> nn.Module:
    return Odd()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
