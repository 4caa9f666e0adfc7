"""A critic whose slope between real and made points is held at one: autograd inside the loss."""

import torch
from torch import Tensor, nn


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1))


def loss(critic: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    real, made, share = batch["real"], batch["made"], batch["share"]
    between = (share * real + (1 - share) * made).requires_grad_()
    score = critic(between)
    (slope,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True, retain_graph=True)
    total: Tensor = critic(made).mean() - critic(real).mean() + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
    return total


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    real, made = torch.randn(16, 6, generator=g), torch.randn(16, 6, generator=g) + 1
    return {"real": real, "made": made, "share": torch.rand(16, 1, generator=g)}
