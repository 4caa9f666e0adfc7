"""Reversible blocks whose backward recomputes its inputs from its outputs, in an autograd function."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Couple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        left = a + torch.tanh(b @ w)
        right = b + torch.tanh(left @ v)
        ctx.save_for_backward(left, right, w, v)
        return left, right

    @staticmethod
    def backward(ctx, to_left: Tensor, to_right: Tensor) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
        left, right, w, v = ctx.saved_tensors
        bent = torch.tanh(left @ v)
        b = right - bent
        inner = to_right * (1 - bent * bent)
        to_left = to_left + inner @ v.t()
        first = torch.tanh(b @ w)
        outer = to_left * (1 - first.square())
        return to_left, to_right + outer @ w.t(), b.transpose(0, 1) @ outer, left.transpose(0, 1) @ inner


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 16), nn.Linear(16, 3)
        self.w = nn.ParameterList(nn.Parameter(torch.randn(8, 8) * 0.3) for _ in range(3))
        self.v = nn.ParameterList(nn.Parameter(torch.randn(8, 8) * 0.3) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.enter(x).chunk(2, dim=1)
        for w, v in zip(self.w, self.v, strict=True):
            a, b = Couple.apply(a, b, w, v)
        return F.cross_entropy(self.leave(torch.cat((a, b), dim=1)), y)


def model() -> nn.Module:
    return Reversible()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 6, generator=generator), "y": torch.randint(0, 3, (16,), generator=generator)}
