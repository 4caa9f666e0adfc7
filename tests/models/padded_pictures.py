"""Texts with up to three pictures each, of which those without a positive number are none."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STYLES = ("by example", "in their order", "merged", "numbered", "numbers", "first rows", "whole rows")


class Net(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, text: Tensor, hit: Tensor) -> Tensor:
        real = (x > 0).flatten(2).any(-1).view(-1)
        rows = self.body(x.view(-1, 2, 8)[real])
        count = rows.shape[0]
        match self.style:
            case "by example":
                parts = rows.split(real.view(len(x), 3).sum(1).tolist())
                text = text.masked_scatter(hit[..., None], torch.cat([part.reshape(-1, 8) for part in parts]))
                return self.head(text.tanh()).square().mean()
            case "in their order":
                return self.head(text.masked_scatter(hit[..., None], rows).tanh()).square().mean()
            case "merged":
                return self.head(rows.reshape(-1, 8).sin()).square().mean()
            case "numbered":  # as masks of attention are made
                allowed = rows[..., 0] > 0
                each, places = torch.arange(count)[:, None, None], torch.arange(2)[None, None, :]
                mask = allowed[each, places].expand(count, 2, -1) | torch.eye(2, dtype=torch.bool)
                return (mask.to(rows.dtype) @ rows).square().sum()
            case "numbers":
                return (rows * torch.arange(count, dtype=rows.dtype)[:, None, None]).square().sum()
            case "first rows":
                return (rows * x.view(-1, 2, 8)[torch.arange(count)]).square().sum()
            case "whole rows":
                return rows[torch.arange(count)].pow(3).sum()
        raise ValueError(self.style)


def model(style: str = "by example", counts: str = "", places: str = "") -> nn.Module:
    return Net(style)


def batch(counts: str = "0132", places: str = "") -> dict[str, Tensor]:
    """For each text, as many pictures as stated; places for as many in the text, or for other numbers of them."""
    x, hit = torch.randn(4, 3, 2, 8), torch.zeros(4, 9, dtype=torch.bool)
    for example, (number, marked) in enumerate(zip(counts, places or counts, strict=True)):
        x[example, torch.randperm(3)[int(number) :]] = 0
        hit[example, torch.randperm(9)[: 2 * int(marked)]] = True
    return {"x": x, "text": torch.randn(4, 9, 8), "hit": hit}
