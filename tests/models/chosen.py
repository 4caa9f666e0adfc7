"""Mixtures that compute every expert for every token, though most scores are zero: one style for each form."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HIDDEN, EXPERTS, CHOICES = 8, 12, 6, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Steered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 0.01


class Mixture(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.gate = style, nn.Linear(WIDTH, EXPERTS)
        if style in ("below", "gathered", "switch", "matched"):
            self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        else:
            self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
            self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)
            self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.style)(x, self.gate(x))

    def every(self, x: Tensor) -> Tensor:
        """The results of all experts: [batch, tokens, experts, width]."""
        made = F.silu(torch.einsum("btd,edh->bteh", x, self.up) + self.bias)
        return torch.einsum("bteh,ehd->bted", made, self.down)

    def mixed(self, x: Tensor, scores: Tensor) -> Tensor:
        return torch.einsum("bted,bte->btd", self.every(x), scores)

    # Forms of which only chosen experts count

    def scatter(self, x: Tensor, logits: Tensor) -> Tensor:
        best, chosen = logits.topk(CHOICES, -1)
        scores = torch.zeros_like(logits).scatter(-1, chosen, best.softmax(-1))
        return (self.every(x) * scores.unsqueeze(-1)).sum(2)

    def below(self, x: Tensor, logits: Tensor) -> Tensor:
        best, chosen = logits.topk(CHOICES, -1)
        scores = torch.full_like(logits, -torch.inf).scatter(-1, chosen, best).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out + scores[..., number : number + 1] * expert(x)
        return out

    def added(self, x: Tensor, logits: Tensor) -> Tensor:
        hidden = torch.full_like(logits, -torch.inf).scatter(-1, logits.topk(CHOICES, -1).indices, 0.0)
        scores = (logits + hidden).softmax(-1)
        return (scores.unsqueeze(-2) @ self.every(x)).squeeze(-2)

    def one_hot(self, x: Tensor, logits: Tensor) -> Tensor:
        best, chosen = logits.softmax(-1).topk(CHOICES, -1)
        return self.mixed(x, (F.one_hot(chosen, EXPERTS) * best.unsqueeze(-1)).sum(-2))

    def masked(self, x: Tensor, logits: Tensor) -> Tensor:
        mask = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, logits.topk(CHOICES, -1).indices, True)
        scores = logits.sigmoid().masked_fill(~mask, 0.0)
        return self.mixed(x, scores / (scores.sum(-1, keepdim=True) + 1e-6))

    def where(self, x: Tensor, logits: Tensor) -> Tensor:
        mask = F.one_hot(logits.topk(CHOICES, -1).indices, EXPERTS).amax(-2).bool()
        return self.mixed(x, torch.where(mask, logits, torch.full_like(logits, -torch.inf)).softmax(-1))

    def repeated(self, x: Tensor, logits: Tensor) -> Tensor:
        tokens, logits = x.reshape(-1, WIDTH), logits.reshape(-1, EXPERTS)
        best, chosen = logits.topk(1, -1)
        scores = torch.full_like(logits, -torch.inf).scatter(1, chosen, best).sigmoid()
        rows = tokens.repeat(EXPERTS, 1) * scores.T.reshape(-1, 1)
        made = torch.bmm(rows.view(EXPERTS, -1, WIDTH), self.up)
        return torch.bmm(F.silu(made) * made, self.down).sum(0).view_as(x) + self.bias.sum()

    def scaled(self, x: Tensor, logits: Tensor) -> Tensor:
        best, chosen = logits.sigmoid().topk(CHOICES, -1)
        scores = torch.zeros_like(logits).scatter(-1, chosen, best)
        made = torch.einsum("bted,edh->bteh", x.unsqueeze(2) * scores.unsqueeze(-1), self.up)
        return torch.einsum("bteh,ehd->btd", F.silu(made) * made, self.down) + self.bias.sum()

    def gathered(self, x: Tensor, logits: Tensor) -> Tensor:
        best, chosen = logits.topk(CHOICES, -1)
        every = torch.stack([expert(x) for expert in self.experts], -2)
        found = every.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, WIDTH))
        return (found * best.softmax(-1).unsqueeze(-1)).sum(-2)

    def switch(self, x: Tensor, logits: Tensor) -> Tensor:
        scores = logits.softmax(-1) * F.one_hot(logits.argmax(-1), EXPERTS)
        return sum(scores[..., number, None] * expert(x) for number, expert in enumerate(self.experts))

    def matched(self, x: Tensor, logits: Tensor) -> Tensor:
        best, chosen = logits.softmax(-1).topk(CHOICES, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out + (best * (chosen == number)).sum(-1, keepdim=True) * expert(x)
        return out

    def larger(self, x: Tensor, logits: Tensor) -> Tensor:
        """The scatter reads the first numbers of each token."""
        best, chosen = logits.topk(CHOICES, -1)
        return self.mixed(x, torch.zeros_like(logits).scatter(-1, chosen, logits.detach())) * best.sum()

    # Forms of which every expert counts

    def threshold(self, x: Tensor, logits: Tensor) -> Tensor:
        """Equal scores may choose more experts."""
        least = logits.topk(CHOICES, -1).values[..., -1:]
        return self.mixed(x, logits.masked_fill(logits < least, -torch.inf).softmax(-1))

    def straight(self, x: Tensor, logits: Tensor) -> Tensor:
        """Scores of other experts are zero but have gradients."""
        soft = logits.softmax(-1)
        return self.mixed(x, F.one_hot(soft.argmax(-1), EXPERTS) - soft.detach() + soft)

    def averaged(self, x: Tensor, logits: Tensor) -> Tensor:
        best, chosen = logits.topk(CHOICES, -1)
        every, scores = self.every(x), torch.zeros_like(logits).scatter(-1, chosen, best)
        return torch.einsum("bted,bte->btd", every, scores) + every.mean(2)

    def competing(self, x: Tensor, logits: Tensor) -> Tensor:
        best, chosen = logits.topk(CHOICES, -1)
        made = torch.einsum("btd,edh->bteh", x, self.up).softmax(2)
        scores = torch.zeros_like(logits).scatter(-1, chosen, best)
        return torch.einsum("bted,bte->btd", torch.einsum("bteh,ehd->bted", made, self.down), scores)

    def shifted(self, x: Tensor, logits: Tensor) -> Tensor:
        """Experts do not map zeros to zeros."""
        tokens, scores = x.reshape(-1, WIDTH), logits.reshape(-1, EXPERTS).sigmoid()
        best, chosen = scores.topk(1, -1)
        scores = torch.zeros_like(scores).scatter(1, chosen, best)
        rows = (tokens.repeat(EXPERTS, 1) * scores.T.reshape(-1, 1)).view(EXPERTS, -1, WIDTH)
        return torch.bmm(torch.bmm(rows, self.up).cos(), self.down).sum(0).view_as(x)

    def by_expert(self, x: Tensor, logits: Tensor) -> Tensor:
        """Experts choose tokens."""
        scores = logits.softmax(-1)
        return self.mixed(x, scores * torch.zeros_like(scores).scatter(1, scores.topk(2, 1).indices, 1.0))

    def twice(self, x: Tensor, logits: Tensor) -> Tensor:
        """A token may choose an expert twice."""
        chosen = torch.stack([logits.argmax(-1), (logits[..., 0] > 0).long()], -1)
        return self.mixed(x, F.one_hot(chosen, EXPERTS).sum(-2) * 0.5)

    def dropped(self, x: Tensor, logits: Tensor) -> Tensor:
        """Random numbers are drawn for every expert."""
        best, chosen = logits.topk(CHOICES, -1)
        scores = torch.zeros_like(logits).scatter(-1, chosen, best)
        return torch.einsum("bted,bte->btd", F.dropout(self.every(x), 0.2), scores)

    def undefined(self, x: Tensor, logits: Tensor) -> Tensor:
        """0 / 0 is no zero."""
        mask = F.one_hot(logits.argmax(-1), EXPERTS).to(logits.dtype)
        return self.mixed(x, (mask / mask).nan_to_num(0.5))

    def infinite(self, x: Tensor, logits: Tensor) -> Tensor:
        """0 · −∞ is no zero."""
        mask = F.one_hot(logits.argmax(-1), EXPERTS).to(logits.dtype)
        return self.mixed(x, (mask * mask.log()).nan_to_num(0.5))

    def steered(self, x: Tensor, logits: Tensor) -> Tensor:
        """The gradients of the results of all experts have an addend."""
        best, chosen = logits.topk(CHOICES, -1)
        scores = torch.zeros_like(logits).scatter(-1, chosen, best)
        return torch.einsum("bted,bte->btd", Steered.apply(self.every(x)), scores)

    def sliced(self, x: Tensor, logits: Tensor) -> Tensor:
        """Some copies of the tokens are left out."""
        best, chosen = logits.topk(CHOICES, -1)
        first, second = x.unsqueeze(2).expand(-1, -1, 2 * EXPERTS, -1).chunk(2, 2)
        scores = torch.zeros_like(logits).scatter(-1, chosen, best)
        return torch.einsum("bted,bte->btd", self.every(x) * first + second, scores)

    def most(self, x: Tensor, logits: Tensor) -> Tensor:
        best, chosen = logits.topk(EXPERTS - 1, -1)
        return self.mixed(x, torch.zeros_like(logits).scatter(-1, chosen, best))


class Net(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), Mixture(style)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(x + self.mixture(self.norm(x)), target)


def model(style: str = "scatter") -> nn.Module:
    return Net(style)


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 6, WIDTH), "target": torch.randn(8, 6, WIDTH)}
