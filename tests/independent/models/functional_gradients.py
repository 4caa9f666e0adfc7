"""Gradients by torch.func: of an energy with norms, per sample with their spread, an inner step, a Hessian's trace."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, jvp, vmap


class Energies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()) for _ in range(6)]
        self.energy = nn.Sequential(*blocks, nn.Linear(4, 1))
        self.critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.rate = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, v: Tensor, label: Tensor) -> Tensor:
        force = grad(lambda x: self.energy(x).sum())(x)
        steep = jvp(grad(lambda x: self.critic(x).logsumexp(1).sum()), (x,), (v,))[1]
        weights = dict(self.critic.named_parameters())

        def one(weights: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.critic, weights, (row[None],)), label[None])

        each, losses = vmap(grad_and_value(one), in_dims=(None, 0, 0))(weights, x, label)
        norms = sum(gradient.flatten(1).square().sum(1) for gradient in each.values()).sqrt()
        stepped = {name: weights[name] - self.rate * each[name].mean(0) for name in weights}
        after = F.cross_entropy(functional_call(self.critic, stepped, (v,)), label)
        curved = vmap(lambda row: hessian(lambda row: self.critic(row).sum())(row).diagonal().sum())(x)
        sides = vmap(jacrev(self.critic))(x).square().mean()
        terms = (force + x).square().mean() + steep.square().mean() + 0.1 * curved.square().mean() + sides
        return losses.mean() + after + 0.1 * norms.var() + terms


def model() -> nn.Module:
    return Energies()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, v = torch.randn(2, 16, 4, generator=generator)
    return {"x": x, "v": v, "label": torch.randint(3, (16,), generator=generator)}
