"""Autograd functions whose backward differentiates: a checkpoint, reversible layers, an implicit gradient, an adjoint."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Checkpointed(torch.autograd.Function):
    """Backward runs the module again, and accumulates the gradients of its weights."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], x: Tensor, scale: float) -> Tensor:
        with torch.no_grad():
            out = run(x, scale)
        ctx.save_for_backward(x)
        ctx.run, ctx.scale = run, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x, ctx.scale)
        torch.autograd.backward(out, grad)
        return None, x.grad, None


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: list[tuple[nn.Module, nn.Module]]) -> Tensor:
        with torch.no_grad():
            a, b = x.chunk(2, -1)
            for f, g in layers:
                a = a + f(b)
                b = b + g(a)
        ctx.out, ctx.layers = torch.cat([a, b], -1).detach(), layers
        return ctx.out.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (a, b), (grad_a, grad_b) = ctx.out.chunk(2, -1), grad.chunk(2, -1)
        for f, g in reversed(ctx.layers):
            with torch.enable_grad():
                a = a.detach().requires_grad_()
                out = g(a)
                out.backward(grad_b)
            b, grad_a = b - out.detach(), grad_a + a.grad
            with torch.enable_grad():
                b = b.detach().requires_grad_()
                out = f(b)
                out.backward(grad_a)
            a, grad_b = (a - out).detach(), grad_b + b.grad
        return torch.cat([grad_a, grad_b], -1), None


class Implicit(torch.autograd.Function):
    """A fixed point, and the solution of its linear equation by products with the Jacobian."""

    @staticmethod
    def forward(ctx: Any, step: Callable[..., Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(20):
            z = step(z, x)
        ctx.step = step
        ctx.save_for_backward(z, x, *weights)
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        z, x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            z, x = z.detach().requires_grad_(), x.detach().requires_grad_()
            out = ctx.step(z, x)
        solved = grad
        for _ in range(10):
            solved = grad + torch.autograd.grad(out, z, solved, retain_graph=True)[0]
        return None, *torch.autograd.grad(out, (x, *weights), solved)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: Tensor, scale: float = 0.5) -> Tensor:
        return x + scale * self.down(torch.tanh(self.up(self.norm(x))))


class Cell(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        nn.init.uniform_(self.up.weight, -0.1, 0.1)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.up(z) + x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head, self.cell = nn.Linear(5, 8), nn.Linear(8, 3), Cell(8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.fs, self.gs = (nn.ModuleList(Block(4) for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.up(x)
        for number, block in enumerate(self.blocks):
            h = Checkpointed.apply(block, h, 0.25 * (number + 1))
        h = Reversible.apply(h, [*zip(self.fs, self.gs, strict=True)])
        h = Implicit.apply(self.cell, h, *self.cell.parameters())
        return nn.functional.cross_entropy(self.head(h), y)


def model() -> nn.Module:
    return Net()


def batch() -> dict[str, Tensor]:
    return data(0)


def data(step: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return {"x": torch.randn(24, 5, generator=drawn), "y": torch.randint(3, (24,), generator=drawn)}
