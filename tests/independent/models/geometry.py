"""Vectors in space: cross products, rotations from six numbers, quaternions, inertia by eigenvalues, angles."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Geometry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.six, self.four = nn.Linear(12, 6), nn.Linear(12, 4)
        self.mass = nn.Parameter(torch.rand(4))

    def forward(self, points: Tensor, aim: Tensor) -> Tensor:
        flat = points.flatten(1)
        a, b = self.six(flat).chunk(2, -1)
        first = F.normalize(a, dim=-1)
        second = F.normalize(b - (first * b).sum(-1, keepdim=True) * first, dim=-1)
        turn = torch.stack([first, second, torch.linalg.cross(first, second)], -1)
        w, x, y, z = F.normalize(self.four(flat), dim=-1).unbind(-1)
        rows = (
            torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)], -1),
            torch.stack([2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)], -1),
            torch.stack([2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)], -1),
        )
        spin = torch.stack(rows, -2)
        moved = points @ turn.mT + points @ spin.mT
        weight = self.mass.softmax(0)
        centred = moved - (weight[:, None] * moved).sum(1, keepdim=True)
        inertia = torch.einsum("bni,n,bnj->bij", centred, weight, centred)
        spread = torch.linalg.eigvalsh(inertia + torch.diag(torch.tensor([0.0, 0.1, 0.2])))
        angle = torch.atan2(moved[..., 1], moved[..., 0] + 3.0)
        return (
            F.mse_loss(moved, aim)
            + 0.1 * spread.log1p().sum(-1).mean()
            + 0.01 * angle.square().mean()
            + 0.1 * torch.det(inertia).mean()
        )


def model() -> nn.Module:
    return Geometry()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"points": torch.randn(16, 4, 3, generator=generator), "aim": torch.randn(16, 4, 3, generator=generator)}
