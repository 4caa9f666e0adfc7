"""A Fourier neural operator in two dimensions: complex weights multiply the low frequencies of real fields."""

import torch
from torch import Tensor, nn


class Spectral(nn.Module):
    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        shape = (width, width, modes, modes)
        self.low = nn.Parameter(torch.randn(*shape, dtype=torch.cfloat) / width**2)
        self.high = nn.Parameter(torch.randn(*shape, dtype=torch.cfloat) / width**2)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, rows, columns = x.shape
        m, spectrum = self.modes, torch.fft.rfft2(x)
        low = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.low)
        high = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], self.high)
        middle = spectrum.new_zeros(batch, width, rows - 2 * m, m)
        kept = torch.cat((low, middle, high), dim=2)
        rest = spectrum.new_zeros(batch, width, rows, columns // 2 + 1 - m)
        return torch.fft.irfft2(torch.cat((kept, rest), dim=3), s=(rows, columns))


class Operator(nn.Module):
    def __init__(self, width: int = 6, depth: int = 2) -> None:
        super().__init__()
        self.lift = nn.Conv2d(1, width, 1)
        self.spectral = nn.ModuleList(Spectral(width, 3) for _ in range(depth))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(depth))
        self.project = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = nn.functional.gelu(spectral(x) + local(x))
        return self.project(x)


def model() -> nn.Module:
    return Operator()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 1, 9, 8, generator=generator), "y": torch.randn(8, 1, 9, 8, generator=generator)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])
