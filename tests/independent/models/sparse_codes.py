"""Sparse codes by unrolled shrinkage with learned thresholds, and a soft clustering of the codes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(F.normalize(torch.randn(12, 6), dim=1))
        self.threshold, self.step = nn.Parameter(torch.full((12,), 0.1)), nn.Parameter(torch.full((3,), 0.2))
        self.centres = nn.Parameter(torch.randn(4, 12) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        words = F.normalize(self.words, dim=1)
        z = torch.zeros(x.shape[0], 12)
        for size in self.step:
            z = z - size * ((z @ words - x) @ words.t())
            z = z.sign() * F.relu(z.abs() - self.threshold)
        rest = (z @ words - x).square().sum(1)
        near = 1 / (1 + torch.cdist(z, self.centres).square())
        share = near / near.sum(1, keepdim=True)
        aim = share.square() / share.sum(0)
        aim = (aim / aim.sum(1, keepdim=True)).detach()
        return rest.mean() + 0.1 * z.abs().sum(1).mean() + F.kl_div(share.log(), aim, reduction="batchmean")


def model() -> nn.Module:
    return Codes()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator)}
