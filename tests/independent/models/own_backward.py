"""Autograd functions of every style: a GELU, straight-through rounding, reversed gradients, a norm, a product, a loss."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Gelu(torch.autograd.Function):
    """BLOOM's: backward computes from the saved input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        return (0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)) * grad


class Rounded(torch.autograd.Function):
    """Straight through, and no gradient where values are cut off."""

    @staticmethod
    def forward(x: Tensor, steps: int = 8) -> tuple[Tensor, Tensor]:
        inside = x.abs() <= 1
        return (x.clamp(-1, 1) * steps).round() / steps, inside

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        return grad * inside, None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


class Norm(torch.autograd.Function):
    """Keeps the result and one number of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        scale = (x.var(-1, keepdim=True, correction=0) + 1e-5).rsqrt()
        normed = (x - mean) * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        normed, scale, weight = ctx.saved_tensors
        rows = tuple(range(grad.dim() - 1))
        g = grad * weight
        x = None
        if ctx.needs_input_grad[0]:
            x = (g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True)) * scale
        return x, (grad * normed).sum(rows), grad.sum(rows)


class Product(torch.autograd.Function):
    """Two outputs of two products, with gradients scaled apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, a, b)
        return x @ a.T, x @ b.T

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, a, b = ctx.saved_tensors
        one, two = one * 0.7, two * 0.9
        flat = x.flatten(0, -2)
        return one @ a + two @ b, one.flatten(0, -2).T @ flat, two.flatten(0, -2).T @ flat


class Squares(torch.autograd.Function):
    """A loss: a mean of squares, by its sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x - y)
        return (x - y).square().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (error,) = ctx.saved_tensors
        return grad * error * 1.5, None


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.a, self.b = (nn.Parameter(torch.randn(2 * width, width) / 4) for _ in range(2))
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        one, two = Product.apply(Norm.apply(x, self.weight, self.bias), self.a, self.b)
        weight, _ = Rounded.apply(self.down.weight)
        h = Gelu.apply(one) * two
        h.register_hook(lambda grad: grad * 0.5)
        return x + nn.functional.linear(h, weight, self.down.bias)


class Net(nn.Module):
    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.up = nn.Linear(5, width)
        self.up.weight.register_hook(lambda grad: grad * 2)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head, self.critic = nn.Linear(width, 3), nn.Linear(width, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.up(x)
        for block in self.blocks:
            h = block(h)
        loss = Squares.apply(self.head(h), y) + Squares.apply(self.critic(Reversed.apply(h, 0.3)), -y)
        return loss / y.numel()


def model() -> nn.Module:
    return Net()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 4, 5, generator=generator), "y": torch.randn(8, 4, 3, generator=generator)}
