"""Mixtures whose experts' weights are stored in many forms: `-D forms=` names one for each layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPERTS, CHOSEN, WIDTH, HIDDEN, CLASSES = 4, 2, 8, 12, 5
_SHAPES = {
    "flat": ((EXPERTS * HIDDEN, WIDTH), (EXPERTS * HIDDEN, WIDTH)),
    "vector": ((EXPERTS * WIDTH * HIDDEN,), (EXPERTS * HIDDEN * WIDTH,)),
    "middle": ((WIDTH, EXPERTS, HIDDEN), (HIDDEN, EXPERTS, WIDTH)),
    "last": ((WIDTH, HIDDEN, EXPERTS), (HIDDEN, WIDTH, EXPERTS)),
    "minor": ((WIDTH, HIDDEN * EXPERTS), (HIDDEN * EXPERTS, WIDTH)),
    "columns": ((WIDTH, EXPERTS * HIDDEN), (EXPERTS * HIDDEN, WIDTH)),
    "chunks": ((EXPERTS * HIDDEN, WIDTH), (WIDTH, EXPERTS * HIDDEN)),
    "slices": ((EXPERTS * HIDDEN, WIDTH), (WIDTH, EXPERTS * HIDDEN)),
    "rows": ((EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)),
    "both": ((EXPERTS, 2, WIDTH, HIDDEN), (1,)),
    "scaled": ((EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)),
    "gated": ((EXPERTS, WIDTH, 2 * HIDDEN), (EXPERTS, HIDDEN, WIDTH)),
    "biased": ((EXPERTS * HIDDEN, WIDTH), (EXPERTS * HIDDEN, WIDTH)),
    "dense": ((EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)),
    "einsum": ((EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)),
    "masks": ((EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)),
    "repeated": ((EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)),
}


class Mixture(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(shape) / 3) for shape in _SHAPES[form])
        if form == "biased":
            self.up_bias, self.down_bias = (nn.Parameter(torch.randn(EXPERTS * n) / 3) for n in (HIDDEN, WIDTH))
        if form == "masks":
            self.up_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / 3)
        if form == "scaled":
            self.scale = nn.Parameter(torch.rand(EXPERTS, 1, HIDDEN))

    def expert(self, e: int, x: Tensor) -> Tensor:
        up, down = self.up, self.down
        match self.form:
            case "flat":  # as DBRX stores them
                return F.silu(x @ up.view(-1, HIDDEN, WIDTH)[e].t()) @ down.view(-1, HIDDEN, WIDTH)[e]
            case "vector":
                return F.silu(x @ up.view(EXPERTS, WIDTH, HIDDEN)[e]) @ down.view(EXPERTS, HIDDEN, WIDTH)[e]
            case "middle":
                return F.silu(x @ up[:, e]) @ down[:, e]
            case "last":
                return F.silu(x @ up[..., e]) @ down[..., e]
            case "minor":
                return F.silu(x @ up.view(WIDTH, HIDDEN, EXPERTS)[..., e]) @ down.view(HIDDEN, EXPERTS, WIDTH)[:, e]
            case "columns":
                return F.silu(x @ up[:, e * HIDDEN : (e + 1) * HIDDEN]) @ down[e * HIDDEN : (e + 1) * HIDDEN]
            case "chunks":
                return F.linear(F.silu(F.linear(x, up.chunk(EXPERTS)[e])), down.chunk(EXPERTS, 1)[e])
            case "slices":
                place = slice(e * HIDDEN, (e + 1) * HIDDEN)
                return F.linear(F.silu(F.linear(x, up[place])), down[:, place])
            case "rows":
                return F.silu(x @ up.unbind()[e]) @ down.unbind()[e]
            case "both":
                return F.silu(x @ up[e, 0]) @ up[e, 1].t()
            case "scaled":
                return F.silu(x @ (up * self.scale)[e]) @ (down * self.scale.mT)[e]
            case "gated":
                both = (x @ up[e]).unflatten(-1, (HIDDEN, 2))
                return F.silu(both[..., 0]) * both[..., 1] @ down[e]
            case "biased":
                place = slice(e * HIDDEN, (e + 1) * HIDDEN)
                hidden = F.linear(x, up[place], self.up_bias[place])
                return F.silu(hidden) @ down[place] + self.down_bias.view(EXPERTS, WIDTH)[e]
        raise ValueError(self.form)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        logits = self.router(tokens)
        weights, chosen = logits.softmax(-1).topk(CHOSEN, -1)
        match self.form:
            case "dense":  # every token through every expert, and the masked scores of each
                scores = torch.zeros_like(logits).scatter(1, chosen, weights)
                hidden = F.silu(tokens.expand(EXPERTS, -1, -1) @ self.up)
                return (torch.bmm(hidden, self.down) * scores.t()[..., None]).sum(0).view_as(x)
            case "einsum":
                scores = torch.zeros_like(logits).scatter(1, chosen, weights)
                hidden = F.silu(torch.einsum("td,edf->tef", tokens, self.up))
                return torch.einsum("tef,efd,te->td", hidden, self.down, scores).view_as(x)
            case "repeated":  # Llama 4
                top, chosen = logits.topk(CHOSEN, -1)
                scores = torch.full_like(logits, float("-inf")).scatter_(1, chosen, top).sigmoid()
                rows = tokens.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
                hidden = F.silu(torch.bmm(rows.view(EXPERTS, -1, WIDTH), self.up))
                rows = torch.bmm(hidden, self.down).view(-1, WIDTH)
                return rows.reshape(EXPERTS, -1, WIDTH).sum(0).view_as(x)
            case "masks":
                scores = torch.zeros_like(logits).scatter(1, chosen, weights).view(*x.shape[:2], EXPERTS)
                mixed = torch.zeros_like(x)
                for e in range(EXPERTS):
                    hidden = F.gelu(F.linear(x, self.up[e], self.up_bias[e]))
                    mixed = mixed + F.linear(hidden, self.down[e]) * scores[..., e, None]
                return mixed
        out = torch.zeros_like(tokens)
        for e in range(EXPERTS):
            i, j = torch.where(chosen == e)
            out.index_add_(0, i, self.expert(e, tokens[i]) * weights[i, j, None])
        return out.view_as(x)


class Model(nn.Module):
    def __init__(self, forms: list[str]) -> None:
        super().__init__()
        self.mixtures = nn.ModuleList(map(Mixture, forms))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for mixture in self.mixtures:
            x = x + mixture(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model(forms: str = "flat") -> nn.Module:
    return Model(forms.split("+"))


def batch(batch: int = 8, seq: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, seq, WIDTH, generator=generator)
    return {"x": x, "labels": torch.randint(CLASSES, (batch, seq), generator=generator)}
