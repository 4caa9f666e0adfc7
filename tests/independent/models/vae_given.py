"""A variational autoencoder whose noise comes with the batch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU())
        self.mean, self.spread = nn.Linear(16, 4), nn.Linear(16, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        h = self.encoder(x)
        mean, logvar = self.mean(h), self.spread(h)
        again = self.decoder(mean + (0.5 * logvar).exp() * noise)
        kept = F.binary_cross_entropy_with_logits(again, x.sigmoid(), reduction="none").sum(-1)
        far = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(-1)
        return (kept + 0.3 * far).mean()


def model() -> nn.Module:
    return VAE()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 12, generator=draw), "noise": torch.randn(16, 4, generator=draw)}
