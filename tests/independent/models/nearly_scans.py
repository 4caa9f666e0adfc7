"""Loops over time that look like scans: neighbours, states of two steps, other constants in each step, lengths, both ways."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, WIDTH = 12, 4


class Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.out = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.u, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.each = nn.Parameter(torch.rand(STEPS, WIDTH))
        self.cell, self.norm = nn.GRUCell(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Parameter(torch.rand(9) + 0.3)

    def forward(self, x: Tensor, count: Tensor, y: Tensor) -> Tensor:
        s = self.enter(x)
        empty, ends = torch.zeros_like(s[:, 0]), []

        h, rows = empty, []
        for t in range(1, STEPS):
            h = torch.tanh(self.u(h) + s[:, t] - 0.5 * s[:, t - 1])
            rows.append(h)
        ends.append(torch.stack(rows, 1).mean(1))

        h, rows = empty, []
        for t in range(STEPS - 1):
            h = h * torch.sigmoid(s[:, t]) + s[:, t + 1] * 0.9**t
            rows.append(h)
        ends.append(torch.stack(rows, 1).amax(1))

        a, b, rows = empty, empty, []
        for t in range(STEPS):
            a, b = torch.tanh(self.v(b) + s[:, t] + 0.3 * a), a
            rows.append(b)
        ends.append(torch.stack(rows, 1)[:, ::3].sum(1))

        h, rows = s[:, -1], []
        for t in reversed(range(STEPS)):
            h = torch.tanh(h * self.each[t] + s[:, t])
            rows.insert(0, h)
        back, h, rows = torch.stack(rows, 1), torch.ones_like(h), []
        for t in range(STEPS):
            h = torch.tanh(h * self.each[t] + s[:, t] * back[:, STEPS - 1 - t])
            rows.append(h + back[:, t])
        ends.append((torch.stack(rows, 1) * s).mean(1))

        h, rows = empty, []
        for t in range(STEPS):
            new = self.cell(s[:, t], h)
            h = torch.where((t < count)[:, None], new, h)
            rows.append(new)
        ends.append(h + 0.1 * torch.stack(rows)[count - 1, torch.arange(len(x))])

        h = empty
        for t in range(0, STEPS, 2):
            h = torch.tanh(h + s[:, t : t + 2].sum(1))
        ends.append(h)

        h, rows = empty, []
        for t, element in enumerate(s.unbind(1)):
            h = self.norm(h + element * (1 + t % 2))
            rows.append(h)
        ends.append(torch.cat(rows[::-1], 1).view_as(s)[:, 1])

        most, total = torch.full_like(h, -1e9), empty
        for element in s.unbind(1):
            larger = torch.maximum(most, element)
            total = total * (most - larger).exp() + (element - larger).exp()
            most = larger
        ends.append(most + total.log())

        held = torch.zeros(len(x), STEPS + 2, WIDTH, dtype=s.dtype)
        for t in range(STEPS):
            held[:, t + 2] = torch.tanh(held[:, t].clone() + held[:, t + 1].clone() * 0.5 + s[:, t])
        ends.append(held[:, 2:].mean(1))
        return F.cross_entropy(self.out(sum(w * end for w, end in zip(self.mix, ends, strict=True))), y)


def model() -> nn.Module:
    return Loops()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(16, STEPS, 3, generator=generator),
        "count": torch.randint(1, STEPS + 1, (16,), generator=generator),
        "y": torch.randint(0, 2, (16,), generator=generator),
    }
