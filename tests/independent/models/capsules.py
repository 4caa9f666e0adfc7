"""Capsules with routing by agreement: two rounds of softmax over couplings that are made in forward."""

import torch
from torch import Tensor, nn


def squash(x: Tensor) -> Tensor:
    size = x.square().sum(-1, keepdim=True)
    return x * size / (1 + size) / (size + 1e-6).sqrt()


class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Linear(12, 6 * 4)
        self.votes = nn.Parameter(torch.randn(6, 3, 4, 5) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        u = squash(self.lower(x).view(-1, 6, 4))
        votes = torch.einsum("bid,ijde->bije", u, self.votes)
        logits = torch.zeros(x.shape[0], 6, 3)
        for _ in range(3):
            share = logits.softmax(-1)
            v = squash((share.unsqueeze(-1) * votes).sum(1))
            logits = logits + (votes * v.unsqueeze(1)).sum(-1)
        return v


def model() -> nn.Module:
    return Capsules()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return {"x": torch.randn(16, 12, generator=draw), "label": torch.randint(0, 3, (16,), generator=draw)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    length = model(batch["x"]).norm(dim=-1)
    right = nn.functional.one_hot(batch["label"], 3)
    margin = right * (0.9 - length).relu() ** 2 + 0.5 * (1 - right) * (length - 0.1).relu() ** 2
    return margin.sum(-1).mean()
