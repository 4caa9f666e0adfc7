"""A siamese encoder: one body on two inputs, with a contrastive loss by hand."""

import torch
from torch import Tensor, nn


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 5))
        self.margin = nn.Parameter(torch.tensor(1.0))

    def forward(self, left: Tensor, right: Tensor, same: Tensor) -> Tensor:
        a, b = self.body(left), self.body(right)
        apart = ((a - b).square().sum(-1) + 1e-8).sqrt()
        return (same * apart.square() + (1 - same) * (self.margin - apart).clamp(min=0).square()).mean()


def model() -> nn.Module:
    return Encoder()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    left = torch.randn(16, 9, generator=draw)
    same = torch.randint(0, 2, (16,), generator=draw).float()
    other = torch.randn(16, 9, generator=draw)
    return {"left": left, "right": torch.where(same[:, None] > 0, left + 0.1 * other, other), "same": same}
