"""Weights that are never whole: a tensor train, a Kronecker product, butterflies, a circulant by its row."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Trains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cores = nn.ParameterList(nn.Parameter(torch.randn(*shape) * 0.5) for shape in ((1, 4, 2, 3), (3, 4, 2, 1)))
        self.a, self.b = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(2, 2))
        self.wings = nn.Parameter(torch.randn(2, 2, 2, 2))
        self.row = nn.Parameter(torch.randn(4) * 0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = self.cores
        h = torch.einsum("bij,aimr,rjnc->bmn", x.view(-1, 4, 4), left, right).flatten(1)
        h = F.hardswish(h @ torch.kron(self.a, self.b))
        for level in range(2):
            pairs = h.view(-1, 2, 2) if level else h.view(-1, 2, 2).transpose(1, 2)
            h = torch.einsum("bpi,pij->bpj", pairs, self.wings[level]).reshape(-1, 4)
        circle = torch.stack([self.row.roll(k) for k in range(4)])
        return F.cross_entropy(self.head(torch.tanh(h @ circle)), y)


def model() -> nn.Module:
    return Trains()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 16, generator=generator), "y": torch.randint(0, 3, (16,), generator=generator)}
