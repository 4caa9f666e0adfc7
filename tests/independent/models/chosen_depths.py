"""Tokens chosen by a router pass through a block, the others around it; a loss that teaches the router the choice."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Depths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.router = nn.Linear(8, 1)
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        score = self.router(h).squeeze(-1)
        top, at = score.topk(3, dim=1, sorted=False)
        at, order = at.sort(dim=1)
        top = top.gather(1, order)
        rows = at.unsqueeze(-1).expand(-1, -1, 8)
        done = self.block(h.gather(1, rows)) * top.sigmoid().unsqueeze(-1)
        h = h.scatter_add(1, rows, done)
        chosen = torch.zeros_like(score).scatter(1, at, 1.0)
        teach = F.binary_cross_entropy_with_logits(score, chosen)
        return F.cross_entropy((h @ self.table.weight.T)[:, :-1].transpose(1, 2), tokens[:, 1:]) + 0.05 * teach


def model() -> nn.Module:
    return Depths()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"tokens": torch.randint(0, 16, (16, 8), generator=generator)}
