"""Hooks in all places: inputs changed before a module, outputs after it, gradients scaled, a module used twice."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.shared, self.leave = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.alias = self.shared
        self.enter.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))
        self.shared.register_forward_hook(lambda module, given, result: result + given[0])
        self.shared.weight.register_hook(lambda slope: slope * 0.25)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.celu(self.enter(x))
        h = F.tanhshrink(self.shared(h)) + F.softshrink(self.alias(h), 0.2)
        if h.requires_grad:
            h.register_hook(lambda slope: slope * slope.new_tensor([2.0, 0.0, -1.0, 0.5]).repeat(2))
        return F.mse_loss(F.threshold(self.leave(h), 0.0, -0.1), y)


def model() -> nn.Module:
    return Hooked()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randn(16, 2, generator=generator)}
