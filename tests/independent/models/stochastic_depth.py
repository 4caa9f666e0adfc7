"""Random numbers of several kinds in forward: layers left out by sample, noise on inputs, a mixing coefficient."""

import torch
from torch import Tensor, nn

RANDOM = True


class Depth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = x + 0.1 * torch.randn_like(x)
        for block in self.blocks:
            kept = (torch.rand(x.shape[0], 1) < 0.8).to(x.dtype) / 0.8
            h = h + kept * block(h).tanh()
        return nn.functional.mse_loss(self.head(nn.functional.dropout(h, 0.1, training=self.training)), x)


def model() -> nn.Module:
    return Depth()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(16, 6, generator=torch.Generator().manual_seed(step))}
