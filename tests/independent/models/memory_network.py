"""An end-to-end memory network: three hops of attention over embedded sentences, tables shared by neighbouring hops."""

import torch
from torch import Tensor, nn


class Memory(nn.Module):
    def __init__(self, words: int = 20, width: int = 8, hops: int = 3) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(words, width, padding_idx=0) for _ in range(hops + 1))
        self.times = nn.Parameter(torch.randn(hops + 1, 5, width) * 0.1)

    def forward(self, story: Tensor, question: Tensor) -> Tensor:
        u = self.tables[0](question).sum(1)
        for hop in range(3):
            keys = self.tables[hop](story).sum(2) + self.times[hop]
            values = self.tables[hop + 1](story).sum(2) + self.times[hop + 1]
            weight = (keys * u.unsqueeze(1)).sum(-1).softmax(-1)
            u = u + (weight.unsqueeze(-1) * values).sum(1)
        return u @ self.tables[-1].weight.t()


def model() -> nn.Module:
    return Memory()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    words = lambda *shape: torch.randint(0, 20, shape, generator=draw)  # noqa: E731
    return {"story": words(16, 5, 4), "question": words(16, 4), "answer": words(16)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["story"], batch["question"]), batch["answer"])
