"""Products that look like attention: softmax over queries, sinks in front, behind and of zeros, a mask per head on joined
dimensions, weights that are read twice, renormalised or sparse (sparsemax), and rows that are hidden as a whole.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS = 2
LEAST = torch.finfo(torch.float32).min


class Nearly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(5, 12)
        self.sink, self.slope = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.rand(HEADS))
        self.mix, self.out = nn.Parameter(torch.rand(11) + 0.5), nn.Linear(12, 3)

    def forward(self, x: Tensor, pad: Tensor, y: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = pad[:, None, None]
        s = q @ k.mT / 2
        made = [s.masked_fill(future, LEAST).masked_fill(hidden, LEAST).softmax(-1) @ v]
        made.append((q / 2 @ k.mT).masked_fill(future, -math.inf).softmax(-1) @ v)
        made.append((q @ k.mT * 0.5 + torch.where(future, LEAST, 0.0)).softmax(-2) @ v)

        sinks = self.sink.view(1, HEADS, 1, 1).expand(batch, -1, length, 1)
        joined = torch.cat([sinks, q @ k.mT * 0.5], -1)
        made.append((joined - joined.amax(-1, keepdim=True)).softmax(-1)[..., 1:] @ v)
        made.append(torch.cat([q @ k.mT * 0.5, sinks], -1).softmax(-1)[..., :-1] @ v)
        joined = torch.cat([q @ k.mT * 0.5, torch.zeros_like(sinks)], -1).masked_fill(F.pad(future, (0, 1)), LEAST)
        made.append(joined.softmax(-1)[..., :length] @ v)

        weights = (q @ k.mT).mul(0.5).softmax(-1)
        made.append(weights @ v)
        entropy = -(weights * (weights + 1e-9).log()).sum(-1).mean()

        away = (torch.arange(length) - torch.arange(length)[:, None]).abs()
        slopes = (-self.slope[:, None, None] * away).repeat(batch, 1, 1)
        rows, columns, values = (each.reshape(batch * HEADS, length, -1) for each in (q, k, v))
        made.append(torch.bmm(torch.baddbmm(slopes, rows, columns.mT, alpha=0.5).softmax(-1), values).view_as(v))

        parts = torch.exp(s - s.amax(-1, keepdim=True)) * ~hidden
        made.append(parts / (parts.sum(-1, keepdim=True) + 1e-6) @ v)
        ordered = s.sort(-1, descending=True)[0]
        sums = ordered.cumsum(-1) - 1
        support = (ordered * torch.arange(1, length + 1) > sums).sum(-1, keepdim=True)
        made.append((s - sums.gather(-1, support - 1) / support).clamp(min=0) @ v)
        shown = s.masked_fill(hidden | future, LEAST).softmax(-1).masked_fill(hidden.mT, 0.0)
        made.append(shown / shown.sum(-1, keepdim=True).clamp(min=1e-3) @ v)
        total = sum(w * each for w, each in zip(self.mix, made, strict=True))
        return F.cross_entropy(self.out(total.transpose(1, 2).flatten(2)).mT, y) + 0.01 * entropy


def model() -> nn.Module:
    return Nearly()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(16, 6, 5, generator=generator),
        "pad": torch.rand(16, 6, generator=generator) < 0.3,
        "y": torch.randint(0, 3, (16, 6), generator=generator),
    }
