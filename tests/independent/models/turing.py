"""A memory that a controller reads and writes by content in every step of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Machine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(5 + 6, 8), nn.Linear(8 + 6, 5)
        self.key, self.strength = nn.Linear(8, 6), nn.Linear(8, 1)
        self.erase, self.add = nn.Linear(8, 6), nn.Linear(8, 6)
        self.memory = nn.Parameter(torch.randn(7, 6) * 0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, c, read = x.new_zeros(x.shape[0], 8), x.new_zeros(x.shape[0], 8), x.new_zeros(x.shape[0], 6)
        memory = self.memory.expand(x.shape[0], -1, -1)
        loss = x.new_zeros(())
        for t in range(x.shape[1]):
            h, c = self.cell(torch.cat((x[:, t], read), -1), (h, c))
            near = F.cosine_similarity(memory, self.key(h).unsqueeze(1), dim=-1)
            w = (near * F.softplus(self.strength(h))).softmax(-1).unsqueeze(-1)
            memory = memory * (1 - w * self.erase(h).sigmoid().unsqueeze(1)) + w * self.add(h).tanh().unsqueeze(1)
            read = (w * memory).sum(1)
            loss = loss + F.mse_loss(self.out(torch.cat((h, read), -1)), y[:, t])
        return loss / x.shape[1]


def model() -> nn.Module:
    return Machine()


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return dict(x=torch.randn(8, 4, 5, generator=g), y=torch.randn(8, 4, 5, generator=g))


def batch() -> dict[str, Tensor]:
    return data(0)
