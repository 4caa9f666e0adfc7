"""Losses of every kind that torch.nn has, on one small trunk: margins, rankings, likelihoods, divergences."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Bilinear(4, 5, 8)
        self.many, self.one, self.spread = nn.Linear(8, 4), nn.Linear(8, 1), nn.Linear(8, 1)
        self.slope = nn.PReLU(8)

    def forward(self, a: Tensor, b: Tensor, y: Tensor, sign: Tensor, count: Tensor, several: Tensor) -> Tensor:
        h = self.slope(self.trunk(a, b))
        many, one = self.many(h), self.one(h).squeeze(1)
        anchor, near, far = h[:, :2], h[:, 2:4], h[:, 4:6]
        losses = [
            F.multi_margin_loss(many, y, p=2, margin=0.8),
            F.multilabel_margin_loss(many, several),
            F.multilabel_soft_margin_loss(many, (several >= 0).to(many.dtype)),
            F.hinge_embedding_loss(one, sign, margin=0.5),
            F.soft_margin_loss(one, sign),
            F.cosine_embedding_loss(anchor, near, sign, margin=0.1),
            F.margin_ranking_loss(one, self.spread(h).squeeze(1), sign, margin=0.2),
            F.triplet_margin_loss(anchor, near, far, swap=True),
            F.poisson_nll_loss(one, count, full=True),
            F.gaussian_nll_loss(one, count, F.softplus(self.spread(h)).squeeze(1)),
            F.kl_div(many.log_softmax(1), many.flip(1).detach().softmax(1), reduction="batchmean"),
            F.binary_cross_entropy(many.sigmoid(), (several >= 0).to(many.dtype)),
            F.nll_loss(many.log_softmax(1), y),
        ]
        return torch.stack(losses).mean()


def model() -> nn.Module:
    return Losses()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "a": torch.randn(16, 4, generator=generator),
        "b": torch.randn(16, 5, generator=generator),
        "y": torch.randint(0, 4, (16,), generator=generator),
        "sign": torch.randint(0, 2, (16,), generator=generator) * 2.0 - 1.0,
        "count": torch.randint(0, 5, (16,), generator=generator).float(),
        "several": torch.stack([torch.randperm(4, generator=generator) for _ in range(16)]).where(
            torch.arange(4) < torch.randint(1, 4, (16, 1), generator=generator), -1
        ),
    }
