"""A convolution whose kernel is used in four turns and mirrored: outputs of each turn side by side, pooled."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Turned(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, into, 3, 3) * 0.3)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        turns = [torch.rot90(self.weight, k, (2, 3)) for k in range(4)]
        turns += [torch.flip(turn, (3,)) for turn in turns]
        return F.conv2d(x, torch.cat(turns), self.bias.repeat(8), padding=1)


class Equivariant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Turned(2, 3), Turned(3, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        h = h.view(h.shape[0], 8, 3, *h.shape[2:]).amax(1)
        h = F.local_response_norm(h, 3)
        h = self.second(F.hardtanh(h)).unflatten(1, (8, 4)).mean(1)
        return F.cross_entropy(self.head(F.lp_pool2d(h, 2.0, 2).flatten(2).logsumexp(-1)), y)


def model() -> nn.Module:
    return Equivariant()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 2, 6, 6, generator=generator), "y": torch.randint(0, 3, (16,), generator=generator)}
