"""A causal transformer whose feed-forward layers are experts in a loop, with a table of tags; for all axes at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS, TAGS, EXPERTS, CHOSEN, HEADS = 8, 32, 64, 4, 2, 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(0.3 * torch.randn(EXPERTS, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(0.3 * torch.randn(EXPERTS, WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        scores = scores / scores.sum(-1, keepdim=True)
        mixed = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            token, slot = torch.where(chosen == expert)
            hidden = F.gelu(F.linear(tokens[token], self.up[expert]))
            mixed.index_add_(0, token, F.linear(hidden, self.down[expert]) * scores[token, slot, None])
        return mixed.view_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out, self.experts = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), Experts()

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.experts(self.norm2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.tags = nn.Embedding(WORDS, WIDTH), nn.Embedding(TAGS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        x = self.words(ids) + self.tags(tags).sum(1)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model() -> nn.Module:
    return Model()


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "ids": torch.randint(WORDS, (16, 8), generator=generator),
        "tags": torch.randint(TAGS, (16, 3), generator=generator),
        "labels": torch.randint(WORDS, (16, 8), generator=generator),
    }


def batch() -> dict[str, Tensor]:
    return data(0)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"], batch["tags"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def evaluate(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    right = model(batch["ids"], batch["tags"]).argmax(-1) == batch["labels"]
    return {"loss": loss(model, batch), "right": right.sum()}


def infer(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"logits": model(batch["ids"], batch["tags"])}
