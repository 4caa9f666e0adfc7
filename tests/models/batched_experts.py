"""Experts as batched products: expert choice, dispatch by one-hot numbers within a capacity, soft mixtures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPERTS, SLOTS, WIDTH, HIDDEN = 4, 2, 8, 12


class Layer(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.router = nn.Linear(WIDTH, EXPERTS * (SLOTS if style == "soft" else 1), bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 1, HIDDEN) / 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = getattr(self, self.style)(x, self.router(x))
        return x + mixed

    def experts(self, slots: Tensor) -> Tensor:
        """The results for slots [batch, experts, slots, width]."""
        hidden = torch.einsum("becd,edh->bech", slots, self.up) + self.bias
        return torch.einsum("bech,ehd->becd", F.gelu(hidden), self.down)

    def choice(self, x: Tensor, scores: Tensor) -> Tensor:
        """Each expert takes its best tokens of a sequence."""
        weights, places = scores.softmax(-1).mT.topk(SLOTS, -1)
        wide = places.flatten(1)[..., None].expand(-1, -1, WIDTH)
        found = self.experts(x.gather(1, wide).unflatten(1, (EXPERTS, SLOTS))) * weights[..., None]
        return torch.zeros_like(x).scatter_add(1, wide, found.flatten(1, 2))

    def capacity(self, x: Tensor, scores: Tensor) -> Tensor:
        """Each token has one expert, which takes the first ones of a sequence (GShard)."""
        weights, chosen = scores.softmax(-1).max(-1)
        one = F.one_hot(chosen, EXPERTS)
        place = ((one.cumsum(1) - 1) * one).sum(-1)
        slot = F.one_hot(place.clamp(max=SLOTS), SLOTS + 1)[..., :SLOTS]
        sent = (one[..., None] * slot[:, :, None]).to(x.dtype)
        found = self.experts(torch.einsum("btec,btd->becd", sent, x))
        return torch.einsum("btec,becd->btd", sent * weights[..., None, None], found)

    def soft(self, x: Tensor, scores: Tensor) -> Tensor:
        """Each slot is a mixture of all tokens, each token one of all slots."""
        scores = scores.unflatten(-1, (EXPERTS, SLOTS))
        found = self.experts(torch.einsum("btec,btd->becd", scores.softmax(1), x))
        return torch.einsum("btec,becd->btd", scores.flatten(2).softmax(-1).view_as(scores), found)

    def turned(self, x: Tensor, scores: Tensor) -> Tensor:
        """Experts first, in products of three dimensions."""
        scores = scores.softmax(1)
        slots = torch.einsum("bte,btd->ebd", scores, x)
        found = torch.bmm(F.silu(torch.bmm(slots, self.up) + self.bias), self.down)
        return torch.einsum("bte,ebd->btd", scores, found)


class Model(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.up = nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList(Layer(style) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.up(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(1)), labels)


def model(style: str = "choice") -> nn.Module:
    return Model(style)


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 4, 6), "labels": torch.randint(3, (8,))}
