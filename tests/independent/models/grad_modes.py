"""Parts under no_grad and enable_grad, as decorators and blocks, nested; inference of a teacher; gradients switched by flags."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.train_b = True

    @torch.no_grad()
    def teacher(self, h: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = self.c(h)
        return inner.softmax(-1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x).relu()
        with torch.set_grad_enabled(self.train_b):
            h = h + self.b(h).tanh()
        with torch.no_grad():
            still = self.c(h)
        told = self.teacher(h.detach())
        said = (h * 0.5 + still).log_softmax(-1)
        with torch.set_grad_enabled(False):
            weight = 1 + h.var(1)
        return F.cross_entropy(self.d(h), y) - (told * said).sum(-1).mean() + (weight * h.mean(1)).mean()


def model() -> nn.Module:
    return Modes()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
