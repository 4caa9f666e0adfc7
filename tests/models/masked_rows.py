"""Losses of the rows that a mask selects: `-D style=` says how."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH = 32, 16


class Model(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.body(self.words(ids))))
        chosen = labels != -100
        match self.style:
            case "language":
                return F.cross_entropy(self.head(x[chosen]), labels[chosen])
            case "flat":
                rows = chosen.flatten().nonzero().squeeze(-1)
                return F.cross_entropy(self.head(x.flatten(0, 1)[rows]), labels.flatten()[rows], ignore_index=3)
            case "squares":
                return (x[chosen] - self.words(labels[chosen])).pow(2).mean()
            case "summed":
                return self.head(x)[chosen].logsumexp(-1).sum() / chosen.sum()
            case "distance":
                return F.mse_loss(x[chosen], self.words(ids)[chosen]) + F.l1_loss(x, self.words(ids))
            case "logarithms":  # of numbers that are negative or zero elsewhere
                positive = F.relu(x) > 0
                return -F.relu(x)[positive].log().mean()
            case "selected":
                return torch.masked_select(x, chosen.unsqueeze(-1)).square().mean()
            case "nested":  # masks over rows that another mask has selected
                rows, labels = x[chosen], labels[chosen]
                lower = rows[:, 0] < rows[:, 1]
                written, filled, cubes = torch.zeros_like(rows[:, 0]), rows[:, 2].clone(), rows * 2
                written[lower] = rows[:, 2][lower] * rows[:, 3][lower]
                filled[lower] = 0.5
                cubes[rows > 0.1] = rows[rows > 0.1] ** 3
                places = torch.where(lower)[0]
                if lower.any():
                    written[lower] = written[lower] * rows[places, 4]
                numbered = (rows[places] * places[:, None]).sum()
                entropy = F.cross_entropy(self.head(rows[lower & (labels > 3)]), labels[lower & (labels > 3)])
                return entropy + (written + filled + cubes.sum(1)).sum() / max(1, lower.sum().item()) + numbered
            case "columns":  # one for each selected row
                rows = chosen.flatten().nonzero().flatten()
                known, values = labels.flatten()[rows], x.flatten(0, 1)[rows, 0]
                scores = self.head(x).flatten(0, 1)
                scores[rows, known] = values
                scores = scores.index_put((rows, known), torch.tensor(0.5).to(x), accumulate=True)
                scores[rows] = scores[rows] * 2 + self.head.weight[:, 0]
                scores[rows, known] = self.head.weight[0, 0]
                scores[rows] += 1
                return scores.square().mean()
        raise ValueError(self.style)


def model(style: str = "language") -> nn.Module:
    return Model(style)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(WORDS, (8, 6))
    return {"ids": ids, "labels": torch.where(torch.rand(8, 6) < 0.4, ids, -100)}
