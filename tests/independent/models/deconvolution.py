"""An autoencoder of images: strided convolutions down, transposed ones up, with output padding."""

import torch
from torch import Tensor, nn


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ELU(), nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ELU()
        )
        self.up = nn.Sequential(
            nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1),
            nn.ELU(),
            nn.ConvTranspose2d(4, 2, 4, stride=2, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return (self.up(self.down(x)) - x).square().mean()


def model() -> nn.Module:
    return Images()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(16, 2, 8, 8, generator=torch.Generator().manual_seed(step))}
