"""Mixtures of experts as loops over the experts: `-D style=` says how a loop selects rows and writes them back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, HIDDEN = 48, 16, 24


class Expert(nn.Module):
    def __init__(self, normed: bool, dropout: float) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH) if normed else nn.Identity()
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(self.drop(F.silu(self.gate(x)) * self.up(x)))


class Stacked(nn.Module):
    """The weights of all experts in one tensor each, with biases."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(count, WIDTH, 2 * HIDDEN))
        self.down = nn.Parameter(torch.empty(count, HIDDEN, WIDTH))
        self.up_bias = nn.Parameter(torch.empty(count, 2 * HIDDEN))
        self.down_bias = nn.Parameter(torch.empty(count, WIDTH))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.2)

    def one(self, e: int, x: Tensor) -> Tensor:
        both = x @ self.up[e] + self.up_bias[e]
        gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(gate * 1.7) @ self.down[e] + self.down_bias[e]


class Mixture(nn.Module):
    def __init__(self, style: str, count: int, slots: int) -> None:
        super().__init__()
        self.style, self.count, self.slots = style, count, slots
        self.router = nn.Linear(WIDTH, count, bias=False)
        if style in ("biased", "gated"):
            self.experts: nn.Module = Stacked(count)
        else:
            self.experts = nn.ModuleList(
                Expert("normed" in style, 0.1 if "dropped" in style else 0.0) for _ in range(count)
            )

    def one(self, e: int, x: Tensor) -> Tensor:
        return self.experts.one(e, x) if isinstance(self.experts, Stacked) else self.experts[e](x)  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.reshape(-1, WIDTH)
        scores = F.softmax(self.router(x), -1)
        weights, chosen = scores.topk(self.slots, -1)
        out = torch.zeros_like(x)
        return getattr(self, self.style)(x, scores, weights, chosen, out).view(shape)

    def places(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """Mixtral's published loop."""
        mask = F.one_hot(chosen, self.count).permute(2, 1, 0)
        for e in range(self.count):
            slot, token = torch.where(mask[e])
            rows = x[None, token].reshape(-1, WIDTH)
            out.index_add_(0, token, self.one(e, rows) * weights[token, slot, None])
        return out

    def listed(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """Mixtral's first loop, and Jamba's, which index with lists."""
        mask = F.one_hot(chosen, self.count).permute(2, 1, 0)
        for e in range(self.count):
            slot, token = torch.where(mask[e])
            if token.shape[0] == 0:
                continue
            tokens, slots = token.tolist(), slot.tolist()
            rows = x[None, tokens].reshape(-1, WIDTH)
            out.index_add_(0, token, self.one(e, rows) * weights[tokens, slots, None])
        return out

    def skipped(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        for e in range(self.count):
            token, slot = torch.where(chosen == e)
            if token.numel() == 0:
                continue
            out = out.index_add(0, token, self.one(e, x[token]) * weights[token, slot, None])
        return out

    def added(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        for e in range(self.count):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            if len(token) > 0:
                out[token] += weights[token, slot].unsqueeze(-1) * self.one(e, x[token])
        return out

    def columns(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """Places as columns of a matrix, and as rows of its transpose."""
        each = out.unsqueeze(1).repeat(1, self.slots, 1)
        for e in range(self.count):
            found = (chosen == e).nonzero()
            token, slot = found.T if e % 2 else found.unbind(1)
            each[found[:, 0], slot] += self.one(e, x[token])
        return (each * weights.unsqueeze(-1)).sum(1)

    def by_masks(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """The loop of Mistral's one-file reference, over the masks of all experts."""
        masks = (chosen.unsqueeze(-1) == torch.arange(self.count)).permute(2, 0, 1)
        for e, mask in enumerate(masks):
            token, slot = torch.where(mask)
            out[token] += weights[token, slot, None] * self.one(e, x[token])
        return out

    by_masks_normed = by_masks

    def blended_normed(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """Rows are assigned, not added."""
        for e in range(self.count):
            token, slot = torch.where(chosen == e)
            out[token] = out[token] * 0.5 - self.one(e, x[token]) * weights[token, slot, None]
        return out

    def repeated(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """A token may have one expert twice, of which the assignment keeps one row."""
        return self.added(x, scores, weights, chosen % 3, out)

    def seen(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """An integer of a token grows by its last slot among those with one expert."""
        seen = torch.zeros(len(x), dtype=torch.int64)
        for e in range(3):
            token, slot = torch.where(chosen % 3 == e)
            seen[token] += slot + 1
        return x * seen.unsqueeze(-1)

    def few_numbers(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """Distinct numbers that a narrow type makes equal."""
        return self.added(x, scores, weights, (chosen * 128).to(torch.uint8) // 128, out)

    def repeated_normed(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        return self.blended_normed(x, scores, weights, chosen % 3, out)

    def any_slot(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        for e in range(self.count):
            here = chosen == e
            mask = here.any(dim=-1)
            if mask.any():
                share = (weights * here).sum(-1)
                out[mask] += self.one(e, x[mask]) * share[mask].unsqueeze(-1)
        return out

    def put(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """DeepSeek's published loop for training: every token once for each of its slots."""
        rows, flat = x.repeat_interleave(self.slots, dim=0), chosen.view(-1)
        y = torch.empty_like(rows)
        for e in range(self.count):
            y[flat == e] = self.one(e, rows[flat == e])
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)

    def hits(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """The loop of transformers, over the experts that any token chose."""
        with torch.no_grad():
            mask = F.one_hot(chosen, self.count + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            e = e[0]
            if e == self.count:
                continue
            slot, token = torch.where(mask[e])
            out.index_add_(0, token, self.one(int(e), x[token]) * weights[token, slot, None])
        return out

    biased = skipped

    def gated(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """Weights of the router's own column, and only of the first choice."""
        first = chosen[:, 0]
        for e in range(self.count):
            (token,) = torch.where(first == e)
            out.index_add_(0, token, self.one(e, x[token]) * scores[token, e].unsqueeze(-1))
        return out

    def capacity(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """Tokens beyond an expert's capacity are left out."""
        one = F.one_hot(scores.view(-1, 8, self.count).argmax(-1), self.count)
        one = (one * (one.cumsum(-2) <= 3)).view(-1, self.count)
        for e in range(self.count):
            token = one[:, e].nonzero().squeeze(-1)
            out[token] = self.one(e, x[token])
        return out

    normed = places

    def scaled_by_count(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        for e in range(self.count):
            (token,) = torch.where(chosen[:, 0] == e)
            if token.shape[0] > 0:
                out.index_add_(0, token, self.one(e, x[token]) / token.shape[0])
        return out

    def counted(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        active = 0
        for e in range(self.count):
            (token,) = torch.where(chosen[:, 0] == e)
            if len(token):
                out.index_add_(0, token, self.one(e, x[token]))
                active += 1
        return out / active

    def sized(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        for e in range(self.count):
            (token,) = torch.where(chosen[:, 0] == e)
            out.index_add_(0, token, self.one(e, x[token]) / (token.numel() + 1))
        return out

    def centred(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        for e in range(self.count):
            (token,) = torch.where(chosen[:, 0] == e)
            out.index_add_(0, token, self.one(e, x[token] - x[token].mean(0)))
        return out

    def mixed(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        for e in range(self.count):
            (token,) = torch.where(chosen[:, 0] == e)
            rows = x[token]
            out.index_add_(0, token, self.one(e, (rows @ rows.T).softmax(1) @ rows))
        return out

    dropped = dropped_normed = places

    def dropped_by_place(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """`dropped` without a loop: one dropout for a row of each token and slot."""
        up, gate, down = (
            torch.stack([getattr(expert, name).weight for expert in self.experts])[chosen]
            for name in ("up", "gate", "down")
        )
        hidden = F.silu(torch.einsum("tshw,tw->tsh", gate, x)) * torch.einsum("tshw,tw->tsh", up, x)
        return torch.einsum("tswh,tsh,ts->tw", down, F.dropout(hidden, 0.1), weights)

    def dropped_normed_by_place(
        self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor
    ) -> Tensor:
        """`dropped_normed`, with every row through every expert."""
        for e in range(self.count):
            rows = self.one(e, x.repeat(self.slots, 1)).view(self.slots, *x.shape)
            out = out + torch.einsum("stw,ts->tw", rows, weights * (chosen == e))
        return out

    def stacked(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """Every token through every expert, and the scores of all in an einsum."""
        return torch.einsum("te,etw->tw", scores, torch.stack([self.one(e, x) for e in range(self.count)]))

    def side_by_side(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        return (torch.stack([self.one(e, x) for e in range(self.count)], 1) * scores.unsqueeze(-1)).sum(1)

    def joined(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        every = torch.cat([self.one(e, x).unsqueeze(1) for e in range(self.count)], 1)
        return torch.bmm(scores.unsqueeze(1), every).squeeze(1)

    def gathered(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        every = torch.stack([self.one(e, x) for e in range(self.count)], -2)
        found = every.gather(-2, chosen.unsqueeze(-1).expand(-1, -1, WIDTH))
        return (found * weights.unsqueeze(-1)).sum(-2)

    def summed(self, x: Tensor, scores: Tensor, weights: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        masked = torch.zeros_like(scores).scatter(-1, chosen, weights)
        return sum((self.one(e, x) * masked[:, e, None] for e in range(self.count)), out)


class Model(nn.Module):
    def __init__(self, style: str, count: int, slots: int, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.mixtures = nn.ModuleList(Mixture(style, count, slots) for _ in range(depth))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            x = x + mixture(norm(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model(style: str = "places", count: int = 4, slots: int = 2, depth: int = 2) -> nn.Module:
    return Model(style, count, slots, depth)


def batch() -> dict[str, Tensor]:
    return {"ids": torch.randint(WORDS, (8, 8)), "labels": torch.randint(WORDS, (8, 8))}
