"""Loops over time, written out by hand; `loop` names one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

B, T, D = 4, 20, 6


class Loop(nn.Module):
    """A function of (module, x[B, T, D]) with a few weights."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.gates = nn.Linear(D, 3 * D)
        self.cell, self.gru, self.lstm = nn.RNNCell(D, D), nn.GRUCell(D, D), nn.LSTMCell(D, D)
        self.decay = nn.Parameter(torch.linspace(-1, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def recurrence(m: Any, x: Tensor) -> Tensor:
    a, b = m.first(x).sigmoid(), m.second(x)
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + b[:, t]
        ys.append(h)
    return torch.stack(ys, 1)


def last_only(m: Any, x: Tensor) -> Tensor:
    h = x[:, 0] * 0
    for t in range(x.shape[1]):
        h = torch.tanh(m.first(x[:, t]) + m.second(h))
    return h


def peeled(m: Any, x: Tensor) -> Tensor:
    h, ys = None, []
    for t in range(x.shape[1]):
        new = m.first(x[:, t])
        h = new if h is None else h * m.decay.sigmoid() + new
        ys.append(h)
    return torch.stack(ys, 2)


def backwards(m: Any, x: Tensor) -> Tensor:
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in reversed(range(x.shape[1])):
        h = torch.maximum(h, x[:, t]) * m.decay
        ys.append(h)
    return torch.stack(ys[::-1], 1)


def backwards_appended(m: Any, x: Tensor) -> Tensor:
    h, ys = torch.zeros_like(x[:, 0]), []
    for row in x.flip(1).unbind(1):
        h = h * m.decay + row.sin()
        ys.append(h.unsqueeze(1))
    return torch.cat(ys[::-1], 1)


def written(m: Any, x: Tensor) -> Tensor:
    """RWKV's attention: sums relative to the largest exponent so far, written into a tensor in place."""
    key, value = m.first(x), m.second(x)
    out = torch.zeros_like(key)
    num, den, most = (torch.zeros_like(key[:, 0]) for _ in range(3))
    most = most - 1e38
    for t in range(x.shape[1]):
        k, v = key[:, t], value[:, t]
        top = torch.maximum(most, k + m.decay)
        e1, e2 = torch.exp(most - top), torch.exp(k + m.decay - top)
        out[:, t] = ((e1 * num + e2 * v) / (e1 * den + e2)).to(x.dtype)
        top = torch.maximum(most - m.decay.exp(), k)
        e1, e2 = torch.exp(most - m.decay.exp() - top), torch.exp(k - top)
        num, den, most = e1 * num + e2 * v, e1 * den + e2, top
    return out


def cells(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    g, c, e, ys = h, h, h, []
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
        g = m.gru(h, g)
        e, c = m.lstm(g, (e, c))
        ys.append(e + h)
    return torch.stack(ys, 1)


def gated(m: Any, x: Tensor) -> Tensor:
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        r, z, n = (m.gates(x[:, t]) + m.gates(h)).chunk(3, -1)
        h = (1 - z.sigmoid()) * torch.tanh(n * r.sigmoid()) + z.sigmoid() * h
        ys.append(h)
    return torch.stack(ys, 1) + h.unsqueeze(1)


def state_space(m: Any, x: Tensor) -> Tensor:
    """Mamba's slow forward: a state of [batch, channels, states]."""
    step = nn.functional.softplus(m.first(x))
    b, c = m.second(x)[..., :3], m.second(x)[..., 3:]
    a = torch.exp(step[..., None] * -m.decay.exp()[:3])
    u = step[..., None] * b[:, :, None] * x[..., None]
    h, ys = torch.zeros_like(u[:, 0]), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + u[:, t]
        ys.append((h @ c[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(ys, 1)


def chunks(m: Any, x: Tensor) -> Tensor:
    """Linear attention by chunks of two steps."""
    q, k, v = m.first(x), m.second(x), x
    state, ys = torch.zeros(x.shape[0], D, D, dtype=x.dtype), []
    for i in range(0, x.shape[1], 2):
        qi, ki, vi = q[:, i : i + 2], k[:, i : i + 2], v[:, i : i + 2]
        ys.append(qi @ state + (qi @ ki.mT).tril() @ vi)
        state = state + ki.mT @ vi
    return torch.cat(ys, 1)


def read_again(m: Any, x: Tensor) -> Tensor:
    """Values of single steps are read outside."""
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = h * m.decay + x[:, t]
        ys.append(h)
    return torch.stack([ys[3] * 2, *ys, ys[-1] + h, ys[5]], 1)


def lattice(m: Any, x: Tensor) -> Tensor:
    """Sums over paths that stay, or move one place on: the whole state is a gradient of one before."""
    scores = m.first(x).log_softmax(-1)
    state = scores[:, 0]
    for t in range(1, x.shape[1]):
        moved = nn.functional.pad(state[:, :-1], (1, 0), value=-1e30)
        state = torch.logsumexp(torch.stack([state, moved]), 0) + scores[:, t]
    return state.logsumexp(1)


LOOPS = [
    recurrence, last_only, peeled, backwards, backwards_appended, written, cells, gated, state_space, chunks, read_again,
    lattice,
]  # fmt: skip


def shared(m: Any, x: Tensor) -> Tensor:
    """Layers that share weights: no sequence is read."""
    for _ in range(T):
        x = torch.tanh(m.first(x))
    return x


def looked_back(m: Any, x: Tensor) -> Tensor:
    """Each step reads the two before it."""
    a, b, ys = x[:, 0], x[:, 1], []
    for t in range(x.shape[1]):
        a, b = b, a * m.decay + x[:, t]
        ys.append(b)
    return torch.stack(ys, 1)


def of_growing_parts(m: Any, x: Tensor) -> Tensor:
    ys = [x[:, 0]]
    for t in range(1, x.shape[1]):
        ys.append(torch.stack(ys, 1).mean(1) * m.decay + x[:, t])
    return torch.stack(ys, 1)


EVERY = {run.__name__: run for run in (*LOOPS, shared, looked_back, of_growing_parts)}


def model(loop: str = "recurrence", depth: int = 1) -> nn.Module:
    return nn.Sequential(*(Loop(EVERY[loop]) for _ in range(depth)))


def batch(batch: int = B, seq: int = T) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, seq, D)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) ** 2).mean()  # type: ignore[no-any-return]
