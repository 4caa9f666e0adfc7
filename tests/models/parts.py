"""Experts whose sorted rows are divided by listed counts: `-D style=` says how. Some styles are refused."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EXPERTS, CHOSEN, WIDTH, HIDDEN = 4, 2, 6, 10


class Layer(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)

    def expert(self, number: int, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.up[number])), self.down[number])

    def counts(self, chosen: Tensor) -> Tensor:
        match self.style:
            case "split":  # JetMoE's
                return torch.zeros(len(chosen), EXPERTS).scatter(1, chosen, 1).long().sum(0)
            case "scattered":
                return chosen.new_zeros(len(chosen), EXPERTS).scatter_(1, chosen, 1).sum(dim=0)
            case "ones":
                return F.one_hot(chosen, EXPERTS).sum((0, 1))
        return torch.bincount(chosen.flatten(), minlength=EXPERTS)

    def by_ends(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Parts by their ends, as DeepSeek's; each is added to its tokens."""
        order, ends = chosen.argsort(stable=True), torch.bincount(chosen, minlength=EXPERTS).cumsum(0).tolist()
        mixed, start = torch.zeros_like(tokens), 0
        for number, end in enumerate(ends):
            if self.style == "ends" and start == end:
                continue
            rows = order[start:end]
            found = self.expert(number, tokens[rows // CHOSEN]) * scores[rows, None]
            mixed.index_add_(0, rows // CHOSEN, found)
            start = end
        return mixed

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        scores, chosen = self.router(tokens).topk(CHOSEN, dim=-1)
        if self.style in ("ends", "ends of all"):
            return x + self.by_ends(tokens, scores.softmax(-1).flatten(), chosen.flatten()).view(x.shape)
        counts = self.counts(chosen).tolist()
        order = chosen.flatten().argsort() if self.style == "ones" else chosen.flatten().sort(0)[1]
        of = order.div(CHOSEN, rounding_mode="trunc") if self.style == "split" else order // CHOSEN
        rows = tokens[of]
        if self.style in ("split", "scattered"):
            found = torch.cat([self.expert(number, part) for number, part in enumerate(rows.split(counts))])
        elif self.style == "first rows":
            found = torch.cat([self.expert(number, rows[:count]) for number, count in enumerate(counts)])
        elif self.style == "summed":
            found = self.expert(0, rows) * sum(range(counts[0]))
        elif self.style == "turned":
            found = torch.cat([self.expert(number, part) for number, part in enumerate(rows.split(counts[::-1]))])
        else:
            found, start, reached = torch.zeros_like(rows), 0, 0
            for number, count in enumerate(counts):
                if count == 0:
                    continue
                reached += 1
                scale = reached if self.style == "counted" else 1
                found[start : start + count] = scale * self.expert(number, rows[start : start + count])
                start += count
        weighed = found * scores.softmax(-1).flatten()[order][:, None]
        if self.style == "ones":
            back = torch.zeros_like(weighed).index_copy(0, order, weighed)
            mixed = back.view(-1, CHOSEN, WIDTH).sum(1)
        elif self.style == "placed":
            back = torch.empty_like(weighed)
            back[order] = weighed
            mixed = back.view(-1, CHOSEN, WIDTH).sum(1)
        elif self.style == "listed":
            mixed = weighed[order.argsort()].view(-1, CHOSEN, WIDTH).sum(1)
        else:
            mixed = torch.zeros_like(tokens).index_add(0, of, weighed)
        return x + mixed.view(x.shape)


class Mixture(nn.Module):
    def __init__(self, style: str, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(style) for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, target)


def model(style: str = "split", layers: int = 2) -> nn.Module:
    return Mixture(style, layers)


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 4, WIDTH), "target": torch.randn(8, 4, WIDTH)}
