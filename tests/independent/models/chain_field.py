"""A linear-chain conditional field: its partition function by a loop, sequences of several lengths."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.rnn = nn.GRU(8, 6, bidirectional=True, batch_first=True)
        self.emit = nn.Linear(12, 4)
        self.move, self.first, self.last = (nn.Parameter(torch.randn(*s) * 0.1) for s in ((4, 4), (4,), (4,)))

    def forward(self, ids: Tensor, tags: Tensor, length: Tensor) -> Tensor:
        e = self.emit(self.rnn(self.words(ids))[0])
        there = torch.arange(ids.shape[1]) < length[:, None]
        alpha = self.first + e[:, 0]
        gold = self.first[tags[:, 0]] + e[:, 0].gather(1, tags[:, :1])[:, 0]
        for t in range(1, ids.shape[1]):
            grown = (alpha.unsqueeze(2) + self.move).logsumexp(1) + e[:, t]
            alpha = torch.where(there[:, t, None], grown, alpha)
            step = self.move[tags[:, t - 1], tags[:, t]] + e[:, t].gather(1, tags[:, t : t + 1])[:, 0]
            gold = gold + step * there[:, t]
        end = tags.gather(1, length[:, None] - 1)[:, 0]
        return ((alpha + self.last).logsumexp(1) - gold - self.last[end]).mean()


def model() -> nn.Module:
    return Field()


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return dict(
        ids=torch.randint(11, (8, 5), generator=g),
        tags=torch.randint(4, (8, 5), generator=g),
        length=torch.randint(1, 6, (8,), generator=g),
    )


def batch() -> dict[str, Tensor]:
    return data(0)
