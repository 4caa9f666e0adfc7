"""A normalising flow of affine couplings with permutations, trained by its log-determinant."""

import torch
from torch import Tensor, nn


class Coupling(nn.Module):
    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.register_buffer("order", torch.tensor(order))
        self.net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.index_select(1, self.order).chunk(2, 1)
        scale, shift = self.net(a).chunk(2, 1)
        scale = scale.tanh()
        return torch.cat([a, b * scale.exp() + shift], 1), scale.sum(-1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Coupling(order) for order in ([5, 4, 3, 2, 1, 0], [1, 0, 3, 2, 5, 4], [3, 4, 5, 0, 1, 2])
        )

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(x.shape[0])
        for layer in self.layers:
            x, change = layer(x)
            total = total + change
        return (0.5 * x.square().sum(-1) - total).mean()


def model() -> nn.Module:
    return Flow()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(16, 6, generator=torch.Generator().manual_seed(step)) * 1.5}
