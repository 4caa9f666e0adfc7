"""Attention by torch's flex_attention in many styles, and the same (`plain`) by scores and masks of whole tensors."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask, flex_attention

LENGTH, HEADS, WIDTH = 16, 4, 8
compiled_attention = torch.compile(flex_attention, dynamic=False)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q - k < 5


class Attention(nn.Module):
    def __init__(self, style: str, plain: bool) -> None:
        super().__init__()
        self.style, self.plain = style, plain
        self.shared = 2 if style == "grouped" else 1  # query heads of one key head
        self.q = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.kv = nn.Linear(HEADS * WIDTH, 2 * HEADS // self.shared * WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.distances = nn.Parameter(torch.randn(HEADS, 2 * LENGTH) / 4)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2).chunk(2, 1)
        found = (self.by_scores if self.plain else self.flexible)(q, k, v, documents)
        return self.out(found.transpose(1, 2).flatten(2))

    def flexible(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        style, allowed, changed = self.style, causal, None
        examples: int | None = None
        if style == "sliding":
            allowed = and_masks(causal, near)
        elif style == "documents":
            examples = len(q)

            def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (q >= k) & (documents[b, q] == documents[b, k])
        elif style == "empty":

            def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (q > k) & (h < 3)
        elif style == "slopes":

            def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return score + self.slopes[h] * (k - q)
        elif style == "hidden":

            def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return torch.where(documents[b, k] > 0, score, -math.inf) - 0.1 * h
        elif style == "distances":

            def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return score + self.distances[h, q - k + LENGTH]
        elif style == "capped":

            def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return 2 * torch.tanh(score / 2)

        heads = HEADS if style == "empty" else None
        mask = create_block_mask(allowed, examples, heads, LENGTH, LENGTH, device=q.device)
        if style == "sinks":
            found, rows = flex_attention(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True))
            return found * torch.sigmoid(rows.lse - self.sinks[:, None]).unsqueeze(-1)
        attend = compiled_attention if style in ("grouped", "capped") else flex_attention
        return attend(q, k, v, score_mod=changed, block_mask=mask, enable_gqa=self.shared > 1)

    def by_scores(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        style = self.style
        rows, columns = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
        mask = rows >= columns
        scores = q @ k.repeat_interleave(self.shared, 1).mT / math.sqrt(WIDTH)
        if style == "sliding":
            mask = mask & (rows - columns < 5)
        elif style == "documents":
            mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
        elif style == "empty":
            mask = (rows > columns) & (torch.arange(HEADS) < 3)[:, None, None]
        elif style == "slopes":
            scores = scores + self.slopes[:, None, None] * (columns - rows)
        elif style == "hidden":
            mask = mask & (documents > 0)[:, None, None, :]
        elif style == "distances":
            scores = scores + self.distances[:, rows - columns + LENGTH]
        elif style == "capped":
            scores = 2 * torch.tanh(scores / 2)
        shares = scores.masked_fill(~mask, -1e30).softmax(-1).masked_fill(~mask, 0.0)
        found = shares @ v.repeat_interleave(self.shared, 1)
        if style == "sinks":
            sums = scores.masked_fill(~mask, -1e30).logsumexp(-1)
            found = found * torch.sigmoid(sums - self.sinks[:, None]).unsqueeze(-1)
        return found


class Model(nn.Module):
    def __init__(self, style: str, plain: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(32, HEADS * WIDTH)
        self.layers = nn.ModuleList(Attention(style, plain) for _ in range(2))
        self.head = nn.Linear(HEADS * WIDTH, 32)

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x, documents)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def model(style: str = "causal", plain: bool = False) -> nn.Module:
    return Model(style, plain)


def batch() -> dict[str, Tensor]:
    documents = torch.randint(2, (8, LENGTH)).cumsum(1)
    return {"tokens": torch.randint(32, (8, LENGTH)), "documents": documents}
