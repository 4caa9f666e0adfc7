"""Transformer-XL's shifted scores and T5's buckets: two blocks with relative positions of two kinds."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.place = nn.Linear(16, 48, bias=False), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.u, self.v = nn.Parameter(torch.randn(4, 4) * 0.1), nn.Parameter(torch.randn(4, 4) * 0.1)

    def forward(self, h: Tensor, places: Tensor) -> Tensor:
        b, s, _ = h.shape
        q, k, v = self.qkv(h).view(b, s, 3, 4, 4).unbind(2)
        r = self.place(places).view(s, 4, 4)
        content = torch.einsum("bihd,bjhd->bhij", q + self.u, k)
        position = torch.einsum("bihd,jhd->bhij", q + self.v, r)
        position = F.pad(position, (1, 0)).view(b, 4, s + 1, s)[:, :, 1:].reshape(b, 4, s, s)
        scores = (content + position) / 2
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
        return h + self.out(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).reshape(b, s, 16))


class Buckets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.bias = nn.Embedding(8, 4)

    def forward(self, h: Tensor) -> Tensor:
        b, s, _ = h.shape
        away = torch.arange(s)[None, :] - torch.arange(s)[:, None]
        near, far = away.abs(), away.abs().clamp(min=1)
        large = (2 + (far.double() / 2).log() / torch.tensor(4.0).log() * 2).long().clamp(max=3)
        bucket = torch.where(near < 2, near, large) + (away > 0).long() * 4
        q, k, v = (part(h).view(b, s, 4, 4).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = q @ k.mT + self.bias(bucket).permute(2, 0, 1).unsqueeze(0)
        return h + self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, 16))


class Relative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(15, 16)
        self.shifted, self.buckets = Shifted(), Buckets()
        self.register_buffer("places", torch.randn(6, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.buckets(self.shifted(self.table(tokens), self.places))
        return F.cross_entropy((h @ self.table.weight.t()).flatten(0, 1), tokens.roll(-1, 1).flatten())


def model() -> nn.Module:
    return Relative()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"tokens": torch.randint(0, 15, (16, 6), generator=generator)}
