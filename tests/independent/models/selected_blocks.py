"""Sparse attention by hand (NSA): compressed blocks with a sink, the best blocks of each query group, and a window."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, GROUPS, SIZE, BLOCK, WINDOW = 4, 2, 4, 4, 4


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = HEADS * SIZE
        self.embed, self.position = nn.Embedding(12, width), nn.Embedding(64, width)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * GROUPS * SIZE, bias=False)
        self.within = nn.Parameter(torch.randn(2, BLOCK, SIZE) * 0.1)
        self.compress = nn.ModuleList(nn.Sequential(nn.Flatten(-2), nn.Linear(BLOCK * SIZE, SIZE)) for _ in range(2))
        self.gate, self.sink = nn.Linear(width, 3 * HEADS), nn.Parameter(torch.zeros(HEADS))
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        batch, length = ids.shape
        blocks, each = length // BLOCK, HEADS // GROUPS
        x = self.embed(ids) + self.position.weight[:length]
        h = self.norm(x)
        q = self.q(h).view(batch, length, GROUPS, each, SIZE).permute(0, 2, 3, 1, 4)
        k, v = self.kv(h).view(batch, length, 2, GROUPS, SIZE).permute(2, 0, 3, 1, 4)
        kinds = zip(self.compress, (k, v), self.within, strict=True)
        keys, values = (net(t.unflatten(2, (blocks, BLOCK)) + place) for net, t, place in kinds)
        t = torch.arange(length)
        ends = (torch.arange(blocks) + 1) * BLOCK - 1
        scores = torch.einsum("bghtd,bgnd->bghtn", q, keys) * SIZE**-0.5
        scores = scores.masked_fill(~(ends[None] <= t[:, None]), torch.finfo(scores.dtype).min)
        sinks = self.sink.view(1, GROUPS, -1, 1, 1).expand(batch, -1, -1, length, 1)
        weights = torch.cat([sinks, scores], -1).softmax(-1)[..., 1:]
        coarse = torch.einsum("bghtn,bgnd->bghtd", weights, values)

        best = weights.sum(2).detach() + 10 * F.one_hot(t // BLOCK, blocks)
        chosen = torch.zeros(batch, GROUPS, length, blocks, dtype=torch.bool)
        chosen.scatter_(-1, best.topk(2, dim=-1)[1], True)
        causal = t[:, None] >= t
        read = (chosen.repeat_interleave(BLOCK, -1) & causal).unsqueeze(2)
        fine = F.scaled_dot_product_attention(q, k[:, :, None].expand_as(q), v[:, :, None].expand_as(q), attn_mask=read)
        near = causal & (t[:, None] - t < WINDOW)
        k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
        local = F.scaled_dot_product_attention(q.flatten(1, 2), k, v, attn_mask=near).view_as(q)

        gates = self.gate(h).sigmoid().view(batch, length, GROUPS, each, 3).permute(4, 0, 2, 3, 1).unsqueeze(-1)
        mixed = gates[0] * coarse + gates[1] * fine + gates[2] * local
        x = x + self.out(mixed.permute(0, 3, 1, 2, 4).flatten(2))
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), y.flatten())


def model() -> nn.Module:
    return Sparse()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, y = torch.randint(0, 12, (2, 16, 12), generator=generator)
    return {"ids": ids, "y": y}
