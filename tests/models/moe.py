"""Layers of experts written by hand: rows sorted by expert, a shared expert, gates in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPERTS, CHOSEN, WIDTH, HIDDEN, CLASSES, SEQ = 8, 2, 6, 10, 5, 4


class Layer(nn.Module):
    def __init__(self, skew: float) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.skew = skew
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / 3)
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 3)
        self.shared = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        logits = self.router(tokens) - self.skew * torch.arange(EXPERTS)
        scores, chosen = logits.softmax(-1).topk(CHOSEN, dim=-1)
        order = chosen.reshape(-1).sort()
        ends = torch.cumsum(torch.histc(order.values.float(), EXPERTS, 0, EXPERTS - 1), 0, dtype=torch.int32)
        hidden = torch._grouped_mm(tokens[order.indices // CHOSEN], self.up, offs=ends) + self.up_bias[order.values]
        out = torch._grouped_mm(nn.functional.silu(hidden), self.down, offs=ends) + self.down_bias[order.values]
        out = out * scores.reshape(-1)[order.indices].unsqueeze(-1)
        back = torch.empty_like(order.indices)
        back[order.indices] = torch.arange(len(back))
        mixed = out[back].reshape(-1, CHOSEN, WIDTH).sum(1)
        return x + mixed.reshape(x.shape) + self.shared(x)


class Mixture(nn.Module):
    def __init__(self, depth: int, skew: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(skew) for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model(depth: int = 2, skew: float = 0.0) -> nn.Module:
    """With a large `skew` all tokens choose the first experts, and the others have none."""
    return Mixture(depth, skew)


def batch(batch: int = 16, seq: int = SEQ) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, seq, WIDTH, generator=generator)
    return {"x": x, "labels": torch.randint(CLASSES, (batch, seq), generator=generator)}
