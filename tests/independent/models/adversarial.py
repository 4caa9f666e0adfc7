"""A generator and a critic in one loss: each loss stops the training of the other's weights for a while."""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.down(torch.tanh(self.up(x))))).squeeze(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = Critic()

    def penalty(self, x: Tensor, scores: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return grad.square().sum(1).mean()

    def forward(self, real: Tensor, drawn: Tensor) -> Tensor:
        self.critic.requires_grad_(False)
        fake = self.generator(drawn)
        loss = softplus(self.critic(real) - self.critic(fake)).mean()
        self.critic.requires_grad_(True)
        for weight in self.generator.parameters():
            weight.requires_grad = False
        real, fake = real.detach().requires_grad_(), (fake + 0.1 * self.generator(-drawn)).detach().requires_grad_()
        scores, others = self.critic(real), self.critic(fake)
        for weight in self.generator.parameters():
            weight.requires_grad = True
        return loss + softplus(others - scores).mean() + 0.1 * (self.penalty(real, scores) + self.penalty(fake, others))


def model() -> nn.Module:
    return Net()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"real": torch.randn(16, 6, generator=generator), "drawn": torch.randn(16, 4, generator=generator)}
