"""Few shots: the batch's first half makes a prototype per class, the second half is scored by distances to them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Prototypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.body(x)
        half = x.shape[0] // 2
        given, asked = h[:half], h[half:]
        kinds = F.one_hot(y[:half], 4).to(h.dtype)
        centres = kinds.t() @ given / kinds.sum(0).unsqueeze(1).clamp(min=1)
        return F.cross_entropy(-torch.cdist(asked, centres).pow(2), y[half:])


def model() -> nn.Module:
    return Prototypes()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
