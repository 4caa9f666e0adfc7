"""Documents packed into rows: attention within a document only, positions that start anew, ends without a loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(20, 16), nn.Embedding(12, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 20, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        ends = tokens == 0
        document = ends.long().cumsum(1) - ends.long()
        column = torch.arange(tokens.shape[1])
        starts = torch.where(ends, column + 1, 0).roll(1, 1)
        starts[:, 0] = 0
        h = self.table(tokens) + self.place(column - starts.cummax(1).values)
        rows, length, _ = h.shape
        q, k, v = self.qkv(self.norm(h)).view(rows, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        same = (document[:, :, None] == document[:, None, :]) & (column[:, None] >= column[None, :])
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=same[:, None]).transpose(1, 2).flatten(2))
        labels = tokens[:, 1:].masked_fill(ends[:, :-1], -100)
        return F.cross_entropy(self.head(h)[:, :-1].reshape(-1, 20), labels.reshape(-1), ignore_index=-100)


def model() -> nn.Module:
    return Packed()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, 20, (16, 12), generator=generator)
    return {"tokens": tokens.masked_fill(torch.rand(16, 12, generator=generator) < 0.2, 0)}
