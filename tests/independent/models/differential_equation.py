"""Burgers' equation with a learned viscosity: first and second derivatives by autograd inside the loss."""

import torch
from torch import Tensor, nn


class Solution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.viscosity = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.u(x).squeeze(-1)
        return found


def model() -> nn.Module:
    torch.manual_seed(0)
    return Solution()


def loss(model: Solution, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"].clone().requires_grad_(True)
    u = model(x)
    slope = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
    of_x, of_t = slope[:, 0], slope[:, 1]
    curve = torch.autograd.grad(of_x.sum(), x, create_graph=True)[0][:, 0]
    residual = of_t + u * of_x - model.viscosity * curve
    return residual.square().mean() + (model(batch["start"]) - batch["u"]).square().mean()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    start = torch.rand(16, 2, generator=g)
    return {"x": torch.rand(16, 2, generator=g), "start": start, "u": start[:, 0].sin()}
