"""Products with Jacobians by torch.func.vjp: several operands, weights as a dict, nested, and without gradients."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap


class Pulled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        self.head = nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def two(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.net[1](self.net[0](x)) * z.unsqueeze(-1)
        return self.head(hidden), hidden.sum(-1)

    def energy(self, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        out = functional_call(self.net, weights, (x,))
        return out.square().mean(), out

    def pulled(self, x: Tensor) -> Tensor:
        out, pull = vjp(self.net, x)
        return pull(out)[0]

    def forward(self, x: Tensor, z: Tensor, v: Tensor, label: Tensor) -> Tensor:
        (first, second), pull = vjp(self.two, x, z)
        grad_x, grad_z = pull((torch.ones_like(first), second.detach()))
        again_x, again_z = pull((first, torch.zeros_like(second)))
        past = vjp(lambda y: self.net(y) * x, x)[1](v)[0]  # without the gradient past the operand
        energy, pull, out = vjp(
            lambda weights: self.energy(weights, x), dict(self.net.named_parameters()), has_aux=True
        )
        (weights,) = pull(torch.ones_like(energy))
        pull = vjp(self.net, x)[1]
        forward = vjp(lambda u: pull(u)[0], torch.zeros_like(x))[1](v)[0]  # the Jacobian itself times v
        nested = vjp(self.pulled, x)[1](v * self.scale)[0]
        with torch.no_grad():
            target = self.pulled(x)
        rows = vmap(lambda row, u: vjp(self.net, row)[1](u)[0])(x, v)
        loss = F.cross_entropy(first + 0.1 * out[:, :2], label) + 0.1 * (grad_z * again_z).mean()
        for each in (grad_x, again_x, past, forward, nested, rows):
            loss = loss + 0.1 * (each - target).square().mean()
        return loss + 0.01 * sum(each.square().sum() for each in weights.values())


def model() -> nn.Module:
    return Pulled()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, v = torch.randn(2, 16, 3, generator=generator)
    z = torch.rand(16, generator=generator)
    return {"x": x, "z": z, "v": v, "label": torch.randint(2, (16,), generator=generator)}
