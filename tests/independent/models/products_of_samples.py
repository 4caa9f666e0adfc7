"""Products, norms and maxima over the batch: a log-mean-exp, a norm of all features, a product of chances."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, view: Tensor) -> Tensor:
        a, b = self.head(F.relu(self.body(x))).squeeze(1), self.head(F.relu(self.body(view))).squeeze(1)
        bound = a.mean() - (b.logsumexp(0) - torch.tensor(float(len(b))).log())
        chance = torch.sigmoid(a).prod().clamp(min=1e-12).log() / x.shape[0]
        size = torch.linalg.vector_norm(self.body(x)) + self.body(view).norm(p=3) + a.abs().max() + b.std()
        spread = a.amax(0) - a.amin(0) + torch.var_mean(b)[0] + a.softmax(0).square().sum() + b.log_softmax(0)[0]
        return -bound - 0.1 * chance + 0.01 * size + 0.05 * spread + 0.01 * torch.cumsum(a, 0).square().mean()


def model() -> nn.Module:
    return Products()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=generator)
    return {"x": x, "view": x + 0.2 * torch.randn(16, 6, generator=generator)}
