"""Momentum contrast: a key encoder of untrained parameters that follows in forward, and a queue of its keys."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MomentumContrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8))
        self.key = copy.deepcopy(self.query)
        for weight in self.key.parameters():
            weight.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(8, 32), dim=0))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, view: Tensor) -> Tensor:
        q = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            k = F.normalize(self.key(view), dim=1)
        near = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        far = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        scores = torch.cat([near, far], dim=1) / 0.2
        with torch.no_grad():
            at = (self.pointer + torch.arange(k.shape[0])) % self.queue.shape[1]
            self.queue[:, at] = k.T
            self.pointer.copy_((self.pointer + k.shape[0]) % self.queue.shape[1])
        return F.cross_entropy(scores, torch.zeros(scores.shape[0], dtype=torch.long))


def model() -> nn.Module:
    return MomentumContrast()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=generator)
    return {"x": x, "view": x + 0.1 * torch.randn(16, 6, generator=generator)}
