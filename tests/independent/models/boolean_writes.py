"""Places chosen by booleans and numbers: masked writes, index fills and copies, scattered values, takes along."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 4)
        self.fill, self.rows = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.enter(x)
        h = h.clone()
        h[h < -0.5] = 0.25
        h = torch.where(h > 1.5, self.fill, h)
        h = h.index_fill(1, torch.tensor([2]), 0.5)
        h = h.index_copy(1, torch.tensor([1, 3]), h[:, [5, 6]] * 2)
        h = h.scatter(1, y[:, None], 1.0)
        h = h.index_add(1, torch.tensor([0, 0, 7]), h[:, 2:5], alpha=0.5)
        largest = h.argmax(1, keepdim=True)
        peak = torch.take_along_dim(h, largest, 1)
        h = h - 0.1 * peak + torch.stack((h[:, 0], h[:, 1]), 1) @ self.rows
        h = h.masked_fill(torch.eye(8, dtype=torch.bool)[y], 0.0)
        h = h.clone()
        h[:, -1] = h[:, 0].detach() * 0.5
        h[..., 2:4].mul_(0.5)
        return F.cross_entropy(self.leave(h), y)


def model() -> nn.Module:
    return Writes()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randint(0, 4, (16,), generator=generator)}
