"""Connectionist temporal classification by hand: sums over alignments of labels, step by step, with lengths as data."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Alignments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Conv1d(4, 10, 3, padding=1), nn.Linear(10, 6)

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        scores = self.out(self.up(x).relu().transpose(1, 2)).log_softmax(-1)
        rows, steps, _ = scores.shape
        places = 2 * labels.shape[1] + 1
        spelled = torch.zeros(rows, places, dtype=torch.long)
        spelled[:, 1::2] = labels
        skips = F.pad((spelled[:, 2:] != 0) & (spelled[:, 2:] != spelled[:, :-2]), (2, 0))
        emitted = scores.gather(2, spelled[:, None].expand(-1, steps, -1))
        state = torch.full((rows, places), -1e30, dtype=scores.dtype)
        state[:, :2] = emitted[:, 0, :2]
        for t in range(1, steps):
            moved = F.pad(state[:, :-1], (1, 0), value=-1e30)
            skipped = torch.where(skips, F.pad(state[:, :-2], (2, 0), value=-1e30), torch.full_like(state, -1e30))
            state = torch.logsumexp(torch.stack([state, moved, skipped]), 0) + emitted[:, t]
        ends = state.gather(1, torch.stack([2 * lengths, 2 * lengths - 1], 1)).logsumexp(1)
        return (-ends / lengths).mean()


def model() -> nn.Module:
    return Alignments()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(16, 4, 9, generator=g),
        "labels": torch.randint(1, 6, (16, 3), generator=g),
        "lengths": torch.randint(1, 4, (16,), generator=g),
    }
