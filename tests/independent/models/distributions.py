"""Distributions as objects: a mixture's likelihood, reparametrised samples of given noise, divergences."""

import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn


class Distributed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.prior = nn.Linear(5, 6), nn.Linear(3, 15), nn.Parameter(torch.zeros(2, 3))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, spread = self.encode(x).chunk(2, 1)
        posterior = distributions.Normal(mean, F.softplus(spread) + 1e-3)
        prior = distributions.Normal(self.prior[0], self.prior[1].exp())
        z = posterior.mean + posterior.stddev * noise
        logit, place, width = self.decode(z).view(-1, 3, 5).unbind(1)
        each = distributions.Laplace(place, width.exp()).log_prob(x) + distributions.Bernoulli(logits=logit).log_prob(
            (x > 0).to(x.dtype)
        )
        kinds = distributions.Categorical(logits=logit)
        gap = distributions.kl_divergence(posterior, prior).sum(1)
        return (gap - each.sum(1) - 0.1 * kinds.entropy()).mean()


def model() -> nn.Module:
    return Distributed()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 5, generator=generator), "noise": torch.randn(16, 3, generator=generator)}
