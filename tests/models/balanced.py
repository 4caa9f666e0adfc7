"""Layers of experts with balancing losses, as models write them: `kinds` names those that are added up.

With the kind "bias" a bias takes part in the choice of experts, as in DeepSeek-V3; "own bias" is updated by forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EXPERTS, CHOSEN, WIDTH, HIDDEN, CLASSES = 4, 2, 8, 12, 5


class Attached(torch.autograd.Function):
    """DeepSeek-V2's AddAuxiliaryLoss: the loss's gradient is 1, wherever its value goes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        assert loss.numel() == 1
        ctx.dtype = loss.dtype
        ctx.required = loss.requires_grad
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device) if ctx.required else None


def balance(kind: str, logits: Tensor, scores: Tensor, chosen: Tensor, batch: int) -> Tensor:
    length = chosen.shape[0] // batch
    match kind:
        case "sequence" | "attached sequence":  # DeepSeek-V2's seq_aux
            ones = torch.ones(batch, length * CHOSEN, dtype=scores.dtype)
            load = torch.zeros(batch, EXPERTS, dtype=scores.dtype)
            load.scatter_add_(1, chosen.view(batch, -1), ones).div_(length * CHOSEN / EXPERTS)
            return (load * scores.view(batch, length, -1).mean(1)).sum(1).mean()
        case "sigmoid":  # DeepSeek-V3's, equations 17 to 20
            share = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
            load = F.one_hot(chosen.view(batch, length, CHOSEN), EXPERTS).sum((1, 2)) * EXPERTS / (CHOSEN * length)
            return (load * share.view(batch, length, EXPERTS).mean(1)).sum(-1).mean()
        case "z":
            return logits.logsumexp(-1).square().mean()
        case "switch" | "attached switch":
            load = F.one_hot(chosen.flatten(), EXPERTS).to(scores.dtype).mean(0)
            return EXPERTS * (load * scores.mean(0)).sum()
        case "bincount":
            load = torch.bincount(chosen.flatten(), minlength=EXPERTS) / chosen.shape[0]
            return (load * scores.mean(0)).sum()
        case "weighted":
            weights = scores.detach().gather(1, chosen).flatten()
            return (torch.bincount(chosen.flatten(), weights, EXPERTS) / chosen.shape[0] * scores.mean(0)).sum()
        case "importance":  # Shazeer et al. 2017, equation 7
            total = scores.sum(0)
            return total.var() / total.mean() ** 2
    raise ValueError(kind)


class Layer(nn.Module):
    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = tuple(kind for kind in kinds if not kind.endswith("bias"))
        if len(self.kinds) < len(kinds):
            self.register_buffer("bias", torch.zeros(EXPERTS))
        self.own = "own bias" in kinds
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, WIDTH)
        logits = self.router(tokens)
        scores = logits.softmax(-1)
        if hasattr(self, "bias"):
            chosen = (scores + self.bias).topk(CHOSEN, -1).indices
            weights = scores.gather(1, chosen)
            if self.own:
                self.bias += 0.01 * torch.bincount(chosen.flatten(), minlength=EXPERTS)
        else:
            weights, chosen = scores.topk(CHOSEN, -1)
        out = torch.zeros_like(tokens)
        for e in range(EXPERTS):
            i, j = torch.where(chosen == e)
            out.index_add_(0, i, (F.silu(tokens[i] @ self.up[e]) @ self.down[e]) * weights[i, j, None])
        total = torch.zeros((), dtype=x.dtype)
        for number, kind in enumerate(self.kinds):
            term = (0.1 + 0.2 * number) * balance(kind, logits, scores, chosen, x.shape[0])
            if kind.startswith("attached"):
                out = Attached.apply(out, term)  # type: ignore[no-untyped-call]
            else:
                total = total + term
        return x + out.view_as(x), total


class Balanced(nn.Module):
    def __init__(self, kinds: tuple[str, ...], depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kinds) for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            x, term = layer(x)
            total = total + term
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + total


def model(kinds: str = "sequence", depth: int = 2) -> nn.Module:
    return Balanced(tuple(kinds.split("+")), depth)


def batch(batch: int = 8, seq: int = 4) -> dict[str, Tensor]:
    return data(1, batch, seq)


def data(step: int, batch: int = 8, seq: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(batch, seq, WIDTH, generator=generator)
    return {"x": x, "labels": torch.randint(CLASSES, (batch, seq), generator=generator)}
