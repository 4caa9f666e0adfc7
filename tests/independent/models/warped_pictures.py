"""Pictures warped by learned flows: affine grids, bilinear and nearest samples, borders, a smoothness penalty."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Warp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flow = nn.Conv2d(6, 2, 3, padding=1)
        self.turn = nn.Linear(6, 6)
        nn.init.normal_(self.flow.weight, std=0.05)

    def forward(self, moving: Tensor, fixed: Tensor) -> Tensor:
        both = torch.cat([moving, fixed], 1)
        still = torch.eye(2, 3).flatten()
        theta = (still + 0.1 * self.turn(both.mean((2, 3)))).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(moving.shape), align_corners=False)
        flow = self.flow(both)
        grid = grid + flow.permute(0, 2, 3, 1)
        warped = F.grid_sample(moving, grid, padding_mode="border", align_corners=False)
        zeros = F.grid_sample(moving, grid * 1.1, mode="bicubic", padding_mode="zeros", align_corners=False)
        rough = flow.diff(dim=2).square().mean() + flow.diff(dim=3).abs().mean()
        return F.l1_loss(warped, fixed) + 0.3 * F.mse_loss(zeros, fixed) + 0.05 * rough


def model() -> nn.Module:
    return Warp()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "moving": torch.rand(16, 3, 7, 6, generator=generator),
        "fixed": torch.rand(16, 3, 7, 6, generator=generator),
    }
