"""A hyperbolic classifier: exponential maps, Möbius sums, distances to learned points of the ball."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Ball(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(6, 4)
        self.points = nn.Parameter(torch.randn(5, 4) * 0.2)
        self.curve = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        c = F.softplus(self.curve)
        v = self.turn(x)
        size = v.norm(dim=-1, keepdim=True).clamp_min(1e-9)
        on = torch.tanh(c.sqrt() * size) * v / (c.sqrt() * size) * 0.9
        a, b = -on.unsqueeze(1), self.points.unsqueeze(0)
        ab, aa, bb = (a * b).sum(-1, keepdim=True), a.square().sum(-1, keepdim=True), b.square().sum(-1, keepdim=True)
        top = (1 + 2 * c * ab + c * bb) * a + (1 - c * aa) * b
        sum_ = top / (1 + 2 * c * ab + c * c * aa * bb)
        away = 2 / c.sqrt() * torch.atanh((c.sqrt() * torch.linalg.vector_norm(sum_, dim=-1)).clamp(max=1 - 1e-5))
        other = torch.acosh(1 + 2 * (a - b).square().sum(-1) / ((1 - aa) * (1 - bb)).squeeze(-1).clamp_min(1e-3))
        return F.cross_entropy(-away, y) + 0.1 * other.gather(1, y[:, None]).mean()


def model() -> nn.Module:
    return Ball()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randint(0, 5, (16,), generator=generator)}
