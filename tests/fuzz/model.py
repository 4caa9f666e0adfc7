"""A model from a description: small numbers in, an nn.Module out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = tuple[str, int]  # what to do, and a small number that says how


class Body(nn.Module):
    """Steps that each take and give [batch, sequence, width]."""

    def __init__(self, steps: tuple[Step, ...], width: int, shared: nn.Linear) -> None:
        super().__init__()
        self.steps = steps
        self.width = width
        self.shared = shared
        self.parts = nn.ModuleDict()
        self.scales = nn.ParameterDict()
        for index, (kind, number) in enumerate(steps):
            self._add(str(index), kind, number)

    def _add(self, key: str, kind: str, number: int) -> None:
        d = self.width
        match kind:
            case "linear" | "gate":
                self.parts[key] = nn.Linear(d, d, bias=number % 2 == 0)
            case "mlp":
                self.parts[key] = nn.Sequential(nn.Linear(d, d * (1 + number % 3)), nn.GELU())
                self.parts[f"{key}_down"] = nn.Linear(d * (1 + number % 3), d)
            case "norm":
                self.parts[key] = (nn.LayerNorm(d), nn.RMSNorm(d), nn.LayerNorm(d, elementwise_affine=False))[
                    number % 3
                ]
            case "attention":
                self.parts[key] = nn.Linear(d, d + 2 * (d // (1 + number % 2)))
                self.parts[f"{key}_out"] = nn.Linear(d, d, bias=False)
            case "conv":
                self.parts[key] = nn.Conv1d(d, d, 3, padding=1, groups=2 if d % 2 == 0 and number % 2 else 1)
            case "batch_norm":
                self.parts[key] = nn.BatchNorm1d(d)
            case "dropout":
                self.parts[key] = nn.Dropout(0.25)
            case "scale":
                self.scales[key] = nn.Parameter(torch.rand(d if number % 2 else ()) + 0.5)
            case "einsum":
                self.scales[key] = nn.Parameter(torch.randn(2, d, d) / d)

    def forward(self, x: Tensor) -> Tensor:
        kept = x
        for index, (kind, number) in enumerate(self.steps):
            x, kept = self._step(str(index), kind, number, x, kept)
        return x

    def _step(self, key: str, kind: str, number: int, x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        b, t, d = x.shape
        part = dict(self.parts).get(key)
        match kind:
            case "linear" | "norm" | "dropout":
                return part(x), kept
            case "gate":
                return x * part(x).sigmoid(), kept
            case "mlp":
                return x + self.parts[f"{key}_down"](part(x)), kept
            case "shared":
                return self.shared(x).tanh(), kept
            case "keep":
                return x, x
            case "skip":
                return x + kept, kept
            case "attention":
                return x + self._attention(key, number, x), kept
            case "conv":
                return part(x.transpose(1, 2)).transpose(1, 2), kept
            case "batch_norm":
                return part(x.transpose(1, 2)).transpose(1, 2), kept
            case "scale":
                return x * self.scales[key], kept
            case "swap":
                left, right = x.split((d // 2, d - d // 2), -1)
                return torch.cat((right, -left), -1), kept
            case "halves":
                return x.reshape(b, t, 2, d // 2).transpose(1, 2).reshape(b, 2 * t, d // 2).reshape(b, t, d), kept
            case "center":
                return x - x.mean(1 + number % 2, keepdim=True), kept
            case "largest":
                return x - x.amax(1 + number % 2, keepdim=True).detach(), kept
            case "softmax":
                return x * x.softmax(1 + number % 2), kept
            case "mix":
                return (x @ x.mT / d).softmax(-1) @ x, kept
            case "einsum":
                return torch.einsum("btd,hde->bthe", x, self.scales[key]).sum(2), kept
            case "roll":
                return x.roll(1 + number % 2, 1), kept
            case "cumsum":
                return x.cumsum(1) / t, kept
            case "shift":
                return F.pad(x, (0, 0, 1, 0))[:, :-1], kept
            case "stack":
                return torch.stack((x, kept)).mean(0), kept
            case "where":
                return torch.where(x > 0, x, 0.5 * kept), kept
        raise AssertionError(kind)

    def _attention(self, key: str, number: int, x: Tensor) -> Tensor:
        b, t, d = x.shape
        groups = 1 + number % 2
        head = d // 2
        q, k, v = self.parts[key](x).split((d, d // groups, d // groups), -1)
        heads = [y.reshape(b, t, -1, head).transpose(1, 2) for y in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads, is_causal=number % 3 == 0, enable_gqa=groups > 1)
        return self.parts[f"{key}_out"](out.transpose(1, 2).reshape(b, t, d))


class Fuzzed(nn.Module):
    """An embedding, repeated bodies, another body, and a head; weights may be tied or frozen. Tables of columns of the
    ids are added to the embedding.
    """

    def __init__(
        self,
        steps: tuple[Step, ...],
        last: tuple[Step, ...],
        repeat: int,
        width: int,
        vocabulary: int,
        ties: int,
        tables: int = 0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.tables = nn.ModuleList(nn.Embedding(vocabulary + index, width) for index in range(tables))
        self.shared = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Body(steps, width, self.shared) for _ in range(repeat))
        self.last = Body(last, width, self.shared)
        self.head = nn.Linear(width, vocabulary, bias=ties == 2)
        self.regression = ties == 4
        if ties == 1:
            self.head.weight = self.embed.weight
        if ties == 3:
            self.embed.weight.requires_grad_(False)
            self.blocks[0].requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for index, table in enumerate(self.tables):
            x = x + table(ids[:, index % ids.shape[1]])[:, None]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.last(x))
        if self.regression:
            return (logits.mean(1) - F.one_hot(labels[:, 0].clamp(0), logits.shape[-1]).to(x.dtype)).square().sum()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
