"""Every pair of the batch in its right order, by logistic losses; a list-wise likelihood of the sorted scores."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ELU(), nn.Linear(8, 1, bias=False))

    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        score = self.body(x).squeeze(-1)
        upper = torch.triu(torch.ones(x.shape[0], x.shape[0]), diagonal=1)
        sign = torch.sign(gain[:, None] - gain[None, :])
        pairs = F.softplus(-sign * (score[:, None] - score[None, :])) * (sign != 0) * upper
        _, order = torch.sort(gain, descending=True, stable=True)
        best = score[order]
        tail = torch.logcumsumexp(best.flip(0), 0).flip(0)
        return pairs.sum() / ((sign != 0) * upper).sum() + (tail - best).mean() - score.softmax(0).mul(gain).sum()


def model() -> nn.Module:
    return Pairs()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "gain": torch.rand(16, generator=generator)}
