"""A mixture of experts as libraries write it: `-D style=` says how."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EXPERTS, CHOSEN, WIDTH, HIDDEN, CLASSES, SEQ = 4, 2, 8, 16, 5, 4
LOW = torch.bfloat16


class Layer(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / 3)
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        scores, chosen = self.router(tokens).softmax(-1).topk(CHOSEN, dim=-1)
        mixed: Tensor = getattr(self, self.style)(tokens, scores, chosen)
        return x + mixed.reshape(x.shape)

    def batched(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """With a copy of the matrices for each row (transformers' batched_mm)."""
        experts = chosen.reshape(-1)
        rows = tokens.repeat_interleave(CHOSEN, dim=0)
        hidden = torch.bmm(rows.unsqueeze(1), self.up[experts]).squeeze(1) + self.up_bias[experts]
        found = torch.bmm(self.down.mT[experts], hidden.relu().unsqueeze(-1)).squeeze(-1) + self.down_bias[experts]
        return (found * scores.reshape(-1, 1)).view(-1, CHOSEN, WIDTH).sum(1)

    def hashed(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """By numbers that are computed, as those of words are."""
        return self.batched(tokens, scores, (chosen * 7 + 1) % EXPERTS)

    def selected(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """As in `batched`, with the matrices and biases by `index_select`."""
        rows, experts = tokens.repeat_interleave(CHOSEN, dim=0), chosen.flatten()
        hidden = torch.bmm(rows.unsqueeze(1), self.up.index_select(0, experts)).squeeze(1)
        hidden = (hidden + self.up_bias.index_select(0, experts)).relu()
        found = torch.bmm(hidden.unsqueeze(1), self.down.index_select(0, experts)).squeeze(1)
        found = (found + self.down_bias.index_select(0, experts)) * scores.reshape(-1, 1)
        return found.view(-1, CHOSEN, WIDTH).sum(1)

    def einsum(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """As in gpt-oss's own model file."""
        hidden = torch.einsum("bekc,bk->bec", self.up[chosen], tokens) + self.up_bias[chosen]
        found = torch.einsum("bekc,bek->bec", self.down[chosen], hidden.relu()) + self.down_bias[chosen]
        return torch.einsum("bec,be->bc", found, scores)

    def broadcast(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        hidden = tokens[:, None, None] @ self.up[chosen] + self.up_bias[chosen][:, :, None]
        found = hidden.relu() @ self.down[chosen] + self.down_bias[chosen][:, :, None]
        return (found.squeeze(2) * scores[..., None]).sum(1)

    def first(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        best = chosen[:, 0]
        hidden = torch.einsum("bi,bio->bo", tokens, self.up[best]) + self.up_bias[best]
        return torch.einsum("bi,bio->ob", hidden.relu(), self.down[best]).mT * scores[:, :1]

    def crossed(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Two choices of one expert, whose products read each other's results."""
        best, other = chosen.unbind(1)
        gate = torch.einsum("bi,bio->bo", tokens, self.up[best])
        hidden = gate.sigmoid() * torch.einsum("bi,bio->bo", tokens, self.up[other])
        found = torch.einsum("bi,bio->bo", hidden, self.down[best])
        hidden = hidden + torch.einsum("bi,bio->bo", found, self.up[other]).relu()
        return torch.einsum("bi,bio->bo", hidden, self.down[best]) * scores[:, :1] + self.down_bias[other]

    def grouped(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.reshape(-1).sort()
        ends = torch.histc(order.values.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        hidden = F.grouped_mm(tokens[order.indices // CHOSEN], self.up, offs=ends) + self.up_bias[order.values]
        found = torch._grouped_mm(hidden.relu(), self.down, offs=ends) + self.down_bias[order.values]
        back = torch.empty_like(order.indices)
        back[order.indices] = torch.arange(len(back))
        return (found * scores.flatten()[order.indices, None])[back].view(-1, CHOSEN, WIDTH).sum(1)

    def added(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """One expert for each token; its rows are added to the tokens in their order."""
        best = chosen[:, 0]
        order = best.argsort(stable=True)
        ends = best.bincount(minlength=EXPERTS).cumsum(0).to(torch.int32)
        hidden = F.grouped_mm(tokens[order], self.up, offs=ends) + self.up_bias[best[order]]
        found = F.grouped_mm(hidden.relu(), self.down, offs=ends) * scores[order, :1]
        return torch.zeros_like(tokens).scatter_add(0, order[:, None].expand_as(found), found)

    def guarded(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """As in `grouped`, with zeros in the rows of experts on other ranks, which have larger numbers (transformers')."""
        order = chosen.reshape(-1).sort()
        rows, numbers = tokens[order.indices // CHOSEN], order.values
        ends = torch.histc(numbers.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        beyond = (numbers >= EXPERTS).unsqueeze(-1)
        numbers.clamp_(max=EXPERTS - 1)
        rows.masked_fill_(beyond, 0.0)
        hidden = F.grouped_mm(rows, self.up, offs=ends) + self.up_bias[numbers]
        hidden = hidden.masked_fill(beyond, 0.0).relu()
        found = F.grouped_mm(hidden, self.down, offs=ends) + self.down_bias[numbers]
        found = found.masked_fill(beyond, 0.0) * scores.reshape(-1)[order.indices, None]
        back = torch.empty_like(order.indices)
        back[order.indices] = torch.arange(len(back))
        return found[back].view(-1, CHOSEN, WIDTH).sum(1)

    def limited(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """As in `batched`, with the numbers of experts on other ranks clamped (transformers')."""
        return self.batched(tokens, scores, chosen.clamp(0, EXPERTS - 1))

    def skipping(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """As in `guarded`, where a place of the table of experts is none: a token's second choice of it counts nothing."""
        none = chosen == EXPERTS - 1
        return self.guarded(tokens, scores.masked_fill(none, 0.0), chosen.masked_fill(none, 0))

    def mixed(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        return torch._grouped_mm(
            tokens.to(LOW), self.up, offs=chosen.view(-1).bincount(minlength=EXPERTS).cumsum(0).int()
        )

    def cast(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Products in bf16, rows of tokens by gather and scatter_add (torchtitan's)."""
        counts = torch.histc(chosen.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS)
        order = chosen.view(-1).argsort(stable=True)
        token = (order // CHOSEN).reshape(-1, 1).expand(-1, WIDTH)
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = torch._grouped_mm(torch.gather(tokens, 0, token).to(LOW), self.up.bfloat16(), offs=ends).relu()
        found = torch._grouped_mm(hidden, self.down.bfloat16(), offs=ends).type_as(tokens)
        return torch.zeros_like(tokens).scatter_add(0, token, found * scores.view(-1)[order].reshape(-1, 1))

    def written(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Results written to their places in another tensor (torchtitan's)."""
        ends = chosen.view(-1).bincount(minlength=EXPERTS).cumsum(0).int()
        order = chosen.view(-1).argsort(stable=True)
        hidden = torch._grouped_mm(tokens[order // CHOSEN], self.up, offs=ends).relu()
        places = torch.zeros(len(order), WIDTH, dtype=tokens.dtype)
        places[order] = torch._grouped_mm(hidden, self.down, offs=ends)
        return torch.bmm(scores.reshape(-1, 1, CHOSEN), places.reshape(-1, CHOSEN, WIDTH)).squeeze(1)


class Model(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.layer = Layer(style)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layer(x)).flatten(0, 1), labels.flatten())


def model(style: str = "batched") -> nn.Module:
    return Model(style)


def batch(batch: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, SEQ, WIDTH, generator=generator)
    return {"x": x, "labels": torch.randint(CLASSES, (batch, SEQ), generator=generator)}
