"""A batch of bytes, small integers, booleans and halves: pictures of uint8, flags as weights, int32 places."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.table, self.head = nn.Conv2d(3, 6, 3), nn.Embedding(10, 6), nn.Linear(6, 4)
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1))

    def forward(self, picture: Tensor, place: Tensor, flags: Tensor, kind: Tensor) -> Tensor:
        x = (picture / 255 - self.mean) / 0.25
        h = self.conv(x).relu().flatten(2).amax(-1) + self.table(place).mean(1)
        h = torch.where(flags[:, :1], h, h.abs())
        each = F.cross_entropy(self.head(h), kind.long(), reduction="none")
        weight = flags.sum(1) + 1
        wrong = (self.head(h).argmax(1) != kind).to(h.dtype)
        return (each * weight).sum() / weight.sum() + 0 * wrong.mean() + (h * (kind % 2).bool().unsqueeze(1)).mean()


def model() -> nn.Module:
    return Bytes()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "picture": torch.randint(0, 256, (16, 3, 5, 5), generator=generator, dtype=torch.uint8),
        "place": torch.randint(0, 10, (16, 3), generator=generator, dtype=torch.int32),
        "flags": torch.rand(16, 4, generator=generator) < 0.5,
        "kind": torch.randint(0, 4, (16,), generator=generator, dtype=torch.int16),
    }
