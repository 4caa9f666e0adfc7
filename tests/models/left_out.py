"""Experts and an adapter that some steps, or all, leave without a row: `-D style=` says how rows are chosen.

Expert 2 has rare words only, expert 3 has none. Every third step has a rare word, which the adapter reads, too.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HIDDEN, EXPERTS, CHOSEN, CLASSES, SEQ, WORDS, RARE = 8, 16, 4, 2, 5, 4, 11, 10
SHARES = torch.tensor([[0.0, 0.0, -50.0, -50.0], [0.0, 0.0, 50.0, -50.0]])  # of common words, of rare ones


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.down(torch.relu(self.up(x))))


class Mixture(nn.Module):
    def __init__(self, style: str, experts: nn.ModuleList) -> None:
        super().__init__()
        self.style = style
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = experts
        self.register_buffer("shares", SHARES)

    def forward(self, x: Tensor, rare: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        scores, chosen = (self.router(flat) + self.shares[rare.reshape(-1).long()]).softmax(-1).topk(CHOSEN, dim=-1)
        mixed: Tensor = getattr(self, self.style)(flat, scores, chosen)
        return x + mixed.reshape(x.shape)

    def continued(self, flat: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == e)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(flat[rows]) * scores[rows, slots, None])
        return out

    def masks(self, flat: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            mask = (chosen == e).any(-1)
            if mask.any():
                weight = (scores * (chosen == e)).sum(-1, keepdim=True)
                out[mask] += expert(flat[mask]) * weight[mask]
        return out

    def first(self, flat: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            mask = chosen[:, 0] == e
            if mask.any():
                out[mask] = expert(flat[mask]) * scores[mask, :1]
        return out

    def hit(self, flat: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """As in transformers before version 5."""
        out = torch.zeros_like(flat)
        one = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for e in one.sum((-1, -2)).gt(0).nonzero():
            slots, rows = torch.where(one[int(e)])
            out.index_add_(0, rows, self.experts[int(e)](flat[rows]) * scores[rows, slots, None])
        return out


class Net(nn.Module):
    def __init__(self, style: str, depth: int, shared: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        experts = [nn.ModuleList(Expert() for _ in range(EXPERTS)) for _ in range(1 if shared else depth)]
        self.blocks = nn.ModuleList(Mixture(style, experts[0 if shared else index]) for index in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids).clone()
        rare = ids == RARE
        if rare.any():
            x[rare] = x[rare] + torch.tanh(self.adapter(x[rare]))
        for block in self.blocks:
            x = block(x, rare)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


def model(style: str = "continued", depth: int = 2, shared: bool = False) -> nn.Module:
    return Net(style, depth, shared)


def data(step: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    ids = torch.randint(0, RARE, (8, SEQ), generator=drawn)
    if step % 3 == 1:
        ids[5, 2] = RARE
    return {"ids": ids, "labels": torch.randint(0, CLASSES, (8,), generator=drawn)}


def batch() -> dict[str, Tensor]:
    return data(1)
