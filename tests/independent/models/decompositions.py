"""Singular values, eigenvectors and QR of small matrices of each sample, and of a weight."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Decomposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.w = nn.Linear(6, 9), nn.Parameter(torch.randn(3, 3))
        self.leave = nn.Linear(9, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        m = self.enter(x).view(-1, 3, 3)
        values = torch.linalg.svdvals(m)
        even = m @ m.mT + torch.diag(torch.tensor([1.0, 2.0, 4.0]))
        spectrum, vectors = torch.linalg.eigh(even)
        q, r = torch.linalg.qr(self.w + 2 * torch.eye(3))
        low = (vectors * torch.rsqrt(spectrum).unsqueeze(-2)) @ vectors.mT
        inverse = torch.linalg.inv(even) @ q
        features = torch.cat([values, spectrum.log(), (low @ inverse).diagonal(dim1=-2, dim2=-1)], -1)
        return (
            F.cross_entropy(self.leave(features), y)
            + 0.01 * r.diagonal().abs().log().sum()
            + 0.01 * torch.linalg.matrix_norm(m, "nuc").mean()
        )


def model() -> nn.Module:
    return Decomposed()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
