"""Evidence instead of probabilities: Dirichlet and beta distributions by log-gammas and digammas."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Evidence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.share = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor, part: Tensor) -> Tensor:
        h = F.selu(self.body(x))
        alpha = F.softplus(self.classes(h)) + 1
        total = alpha.sum(1, keepdim=True)
        truth = F.one_hot(y, 4).to(alpha.dtype)
        fit = (truth * (total.digamma() - alpha.digamma())).sum(1)
        rest = truth + (1 - truth) * alpha
        excess = (
            torch.lgamma(rest.sum(1))
            - torch.lgamma(torch.tensor(4.0))
            - torch.lgamma(rest).sum(1)
            + ((rest - 1) * (rest.digamma() - rest.sum(1, keepdim=True).digamma())).sum(1)
        )
        a, b = (F.elu(self.share(h)) + 1.1).unbind(1)
        beta = torch.lgamma(a + b) - a.lgamma() - b.lgamma() + (a - 1) * part.log() + torch.xlogy(b - 1, 1 - part)
        return (fit + 0.1 * excess - beta + 0.01 * torch.special.entr(alpha / total).sum(1)).mean()


def model() -> nn.Module:
    return Evidence()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(16, 5, generator=generator),
        "y": torch.randint(0, 4, (16,), generator=generator),
        "part": torch.rand(16, generator=generator) * 0.9 + 0.05,
    }
