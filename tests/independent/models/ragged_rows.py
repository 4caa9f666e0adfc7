"""Rows of many lengths by masks: means, maxima, last states and attention over what is there; empty rows too."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8, padding_idx=0, max_norm=None)
        self.score, self.out = nn.Linear(8, 1), nn.Linear(24, 4)

    def forward(self, words: Tensor, y: Tensor) -> Tensor:
        there = words != 0
        h = self.table(words)
        count = there.sum(1, keepdim=True)
        mean = (h * there.unsqueeze(-1)).sum(1) / count.clamp(min=1)
        most = h.masked_fill(~there.unsqueeze(-1), -1e4).amax(1).clamp(min=-1.0)
        score = self.score(h).squeeze(-1).masked_fill(~there, float("-inf"))
        weights = torch.where(count > 0, score, torch.zeros_like(score)).softmax(-1)
        last = h.gather(1, (count - 1).clamp(min=0).unsqueeze(-1).expand(-1, 1, 8)).squeeze(1)
        out = self.out(torch.cat([mean + last, most, (weights.unsqueeze(-1) * h).sum(1)], -1))
        each = F.cross_entropy(out, y, reduction="none")
        return (each * (count.squeeze(1) > 0)).sum() / (count.squeeze(1) > 0).sum()


def model() -> nn.Module:
    return Ragged()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(1, 12, (16, 6), generator=generator)
    length = torch.randint(0, 7, (16, 1), generator=generator)
    return {
        "words": words.masked_fill(torch.arange(6) >= length, 0),
        "y": torch.randint(0, 4, (16,), generator=generator),
    }
