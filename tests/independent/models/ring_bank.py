"""Contrast with a ring of earlier examples and their labels, which forward writes at a moving place."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Ring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("bank", torch.zeros(32, 8))
        self.register_buffer("labels", torch.full((32,), -1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.normalize(self.enter(x), dim=1)
        likeness = h @ self.bank.clone().t() / 0.3
        same, valid = self.labels[None] == y[:, None], (self.labels >= 0)[None]
        chance = likeness - (likeness.exp() * valid).sum(1, keepdim=True).clamp(min=1e-6).log()
        contrast = -(chance * same).sum(1) / same.sum(1).clamp(min=1)
        with torch.no_grad():
            at = (self.place + torch.arange(x.shape[0])) % 32
            self.bank[at] = h
            self.labels[at] = y
            self.place[0] = (self.place[0] + x.shape[0]) % 32
        return F.cross_entropy(self.leave(h), y) + 0.1 * contrast.mean()


def model() -> nn.Module:
    return Ring()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(16, 6, generator=generator),
        "y": torch.randint(0, 4, (16,), generator=generator),
    }
