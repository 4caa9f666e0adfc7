"""Vector quantisation: the nearest code by distance, a straight-through estimate, commitment by detached halves."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        self.codes = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        apart = z.square().sum(-1, keepdim=True) - 2 * z @ self.codes.t() + self.codes.square().sum(-1)
        chosen = self.codes[apart.argmin(-1)]
        straight = z + (chosen - z).detach()
        commitment = F.mse_loss(chosen, z.detach()) + 0.25 * F.mse_loss(z, chosen.detach())
        return F.mse_loss(self.decoder(straight), x) + commitment


def model() -> nn.Module:
    return Quantised()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(16, 8, generator=torch.Generator().manual_seed(step))}
