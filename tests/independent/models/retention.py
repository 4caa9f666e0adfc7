"""Retention: decays per head instead of a softmax, norms by group, a gate, and a shift of tokens in time."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Retention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(14, 12)
        self.mix = nn.Parameter(torch.rand(3, 12))
        self.q, self.k, self.v = (nn.Linear(12, 12, bias=False) for _ in range(3))
        self.gate, self.out = nn.Linear(12, 12), nn.Linear(12, 14)
        self.decay = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))
        self.norm = nn.GroupNorm(3, 12, affine=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        before = F.pad(h, (0, 0, 1, -1))
        q, k, v = (part(h * m + before * (1 - m)) for part, m in zip((self.q, self.k, self.v), self.mix, strict=True))
        b, s, _ = h.shape
        q, k, v = (x.view(b, s, 3, 4).transpose(1, 2) for x in (q, k, v))
        away = (torch.arange(s)[:, None] - torch.arange(s)).to(h.dtype)
        kept = torch.where(away >= 0, (-away.clamp(min=0) * F.softplus(self.decay).view(3, 1, 1)).exp(), 0.0)
        kept = kept / kept.sum(-1, keepdim=True).sqrt()
        scores = (q @ k.mT) * kept
        scores = scores / scores.detach().abs().sum(-1, keepdim=True).clamp(min=1)
        y = (scores @ v).transpose(1, 2).reshape(b * s, 12)
        y = self.norm(y).view(b, s, 12) * F.silu(self.gate(h))
        return (
            F.cross_entropy(self.out(y)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(0, 1), reduction="sum")
            / tokens.shape[0]
        )


def model() -> nn.Module:
    return Retention()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"tokens": torch.randint(0, 14, (16, 6), generator=generator)}
