"""A differentiable hash table: gather from a learned table by integer features, scatter into slots, pool."""

import torch
from torch import Tensor, nn


class Slots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, 6) * 0.5)
        self.gate = nn.Parameter(torch.zeros(10))
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(6, 2)

    def forward(self, keys: Tensor, slot: Tensor, y: Tensor) -> Tensor:
        values = self.table[keys] * self.gate.sigmoid()[keys].unsqueeze(-1)
        index = slot.unsqueeze(-1).expand(-1, -1, 6)
        slots = torch.zeros(keys.shape[0], 4, 6).scatter_add(1, index, values)
        picked = torch.take_along_dim(slots, slot[:, :1, None].expand(-1, 1, 6), 1).squeeze(1)
        return nn.functional.mse_loss(self.out(self.mix(slots.amax(1)) + picked), y)


def model() -> nn.Module:
    return Slots()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    keys = torch.randint(0, 10, (16, 5), generator=draw)
    slot = torch.randint(0, 4, (16, 5), generator=draw)
    return {"keys": keys, "slot": slot, "y": torch.randn(16, 2, generator=draw)}
