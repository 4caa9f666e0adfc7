"""A variational autoencoder that draws its noise in forward, with a dropout before it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RANDOM = True


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 12)
        self.drop = nn.Dropout(0.2)
        self.mean, self.spread = nn.Linear(12, 4), nn.Linear(12, 4)
        self.decoder = nn.Linear(4, 8)
        self.eval_drop = nn.Dropout(0.5).eval()

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.encoder(x).tanh())
        mean, logvar = self.mean(h), self.spread(h)
        z = mean + (0.5 * logvar).exp() * torch.randn_like(mean)
        again = self.decoder(self.eval_drop(z))
        return F.mse_loss(again, x) - 0.01 * (1 + logvar - mean.square() - logvar.exp()).mean()


def model() -> nn.Module:
    return VAE()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(16, 8, generator=torch.Generator().manual_seed(step))}
