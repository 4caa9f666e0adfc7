"""Grouped heads with slopes by distance, scores under a soft cap, a sink per head, norms of queries and keys."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Capped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(18, 16)
        self.q, self.kv, self.o = nn.Linear(16, 32, bias=False), nn.Linear(16, 16, bias=False), nn.Linear(32, 16)
        self.qn, self.kn = nn.RMSNorm(4), nn.RMSNorm(4)
        self.sink = nn.Parameter(torch.zeros(8))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, 9.0))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens) * 4.0
        b, s, _ = h.shape
        q = self.qn(self.q(h).view(b, s, 8, 4)).transpose(1, 2)
        k, v = self.kv(h).view(b, s, 2, 2, 4).unbind(2)
        k = self.kn(k).transpose(1, 2).repeat_interleave(4, dim=1)
        v = v.transpose(1, 2)[:, :, None].expand(b, 2, 4, s, 4).reshape(b, 8, s, 4)
        away = torch.arange(s)[:, None] - torch.arange(s)[None]
        scores = 5.0 * torch.tanh(q @ k.transpose(2, 3) / 10.0) - self.slopes[:, None, None] * away
        scores = scores.masked_fill((away < 0) | (away >= 4), torch.finfo(scores.dtype).min)
        scores = torch.cat([scores, self.sink.view(1, 8, 1, 1).expand(b, 8, s, 1)], -1)
        h = h + self.o((scores.softmax(-1)[..., :-1] @ v).transpose(1, 2).reshape(b, s, 32))
        logits = 3.0 * torch.tanh(F.linear(h, self.table.weight) / 3.0)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return loss + 1e-2 * logits.logsumexp(-1).square().mean()


def model() -> nn.Module:
    return Capped()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"tokens": torch.randint(0, 18, (16, 7), generator=generator)}
