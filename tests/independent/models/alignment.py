"""A sum over all alignments, in logarithms, by a dynamic program along the diagonal: CTC's forward recursion."""

import torch
from torch import Tensor, nn


class Alignment(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emit = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        scores = self.emit(x).log_softmax(-1)
        blank = torch.zeros_like(label[:, :1])
        states = torch.cat([blank, torch.stack([label, torch.zeros_like(label)], -1).flatten(1)], 1)
        emitted = scores.gather(2, states.unsqueeze(1).expand(-1, x.shape[1], -1))
        never = torch.full_like(emitted[:, 0], -30.0)
        alpha = torch.cat([emitted[:, 0, :2], never[:, 2:]], 1)
        for t in range(1, x.shape[1]):
            moved = torch.cat([never[:, :1], alpha[:, :-1]], 1)
            alpha = torch.logaddexp(alpha, moved) + emitted[:, t]
        return -alpha[:, -2:].logsumexp(-1).mean() / x.shape[1]


def model() -> nn.Module:
    return Alignment()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 7, 4, generator=draw), "label": torch.randint(1, 6, (16, 3), generator=draw)}
