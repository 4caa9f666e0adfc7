"""torch's older norms of weights, which hooks compute before each forward: weight_norm and spectral_norm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.weight_norm(nn.Linear(6, 8), dim=0)
        self.second = nn.utils.spectral_norm(nn.Linear(8, 8), n_power_iterations=2)
        self.third = nn.utils.weight_norm(nn.Conv1d(1, 2, 3), dim=None)
        self.leave = nn.Linear(12, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.second(F.relu(self.first(x))))
        return F.cross_entropy(self.leave(self.third(h.unsqueeze(1)).flatten(1)), y)


def model() -> nn.Module:
    return Old()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
