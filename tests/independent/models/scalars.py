"""Parameters of one number each, without a dimension: a physical law fitted to its samples."""

import torch
from torch import Tensor, nn


class Law(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.decay = nn.Parameter(torch.tensor(0.8)), nn.Parameter(torch.tensor(0.3))
        self.pulse, self.phase = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(0.1))
        self.offset = nn.Parameter(torch.tensor([0.05]))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        made = self.gain * torch.exp(-self.decay * t) * torch.cos(self.pulse * t + self.phase) + self.offset
        return torch.log1p((made - y).square()).mean() + 1e-3 * (self.gain.abs() + self.decay**2)


def model() -> nn.Module:
    return Law()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    t = torch.rand(16, 4, generator=torch.Generator().manual_seed(step)) * 3
    return {"t": t, "y": torch.exp(-0.5 * t) * torch.cos(3 * t)}
