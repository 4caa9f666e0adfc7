"""Codes of two views, balanced over the batch by Sinkhorn's rounds, predicted by the other; prototypes on the sphere."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.prototypes = nn.Linear(6, 5), nn.Linear(5, 7, bias=False)

    @torch.no_grad()
    def codes(self, scores: Tensor) -> Tensor:
        q = torch.exp(scores / 0.5).t()
        q = q / q.sum()
        for _ in range(3):
            q = q / q.sum(dim=1, keepdim=True) / q.shape[0]
            q = q / q.sum(dim=0, keepdim=True) / q.shape[1]
        return (q * q.shape[1]).t()

    def forward(self, x: Tensor, view: Tensor) -> Tensor:
        with torch.no_grad():
            weight = F.normalize(self.prototypes.weight.clone(), dim=1)
        a, b = F.normalize(self.body(x)), F.normalize(self.body(view))
        first, second = F.linear(a, weight), self.prototypes(b)
        loss = -(self.codes(first) * F.log_softmax(second / 0.3, 1)).sum(1).mean()
        return loss - (self.codes(second) * F.log_softmax(self.prototypes(a) / 0.3, 1)).sum(1).mean()


def model() -> nn.Module:
    return Balanced()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=generator)
    return {"x": x, "view": x + 0.2 * torch.randn(16, 6, generator=generator)}
