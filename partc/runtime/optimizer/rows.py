"""Optimizers of embedding tables: a step only updates the rows of a sparse gradient.

The rows and columns of a table may be cut over ranks. The parts of a row are on ranks that look up the same ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def rows_of(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of a sparse gradient's rows, each once, and their values; for a dense gradient, all rows."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return gradient._indices()[0], gradient._values()
    return torch.arange(gradient.shape[0], device=gradient.device), gradient


class Adagrad(torch.optim.Adagrad):
    """torch.optim.Adagrad for sparse gradients, without temporary sparse tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                rows, values = rows_of(parameter.grad)
                values = -values if group["maximize"] else values
                state = self.state[parameter]
                state["step"] += 1
                rate = group["lr"] / (1 + (float(state["step"]) - 1) * group["lr_decay"])
                state["sum"].index_add_(0, rows, values.square())
                root = state["sum"].index_select(0, rows).sqrt_().add_(group["eps"])
                parameter.index_add_(0, rows, values.div(root).mul_(-rate))  # alpha= has no fast kernel on CPUs


class SparseAdam(torch.optim.Optimizer):
    """torch.optim.SparseAdam with a tensor as step count, as in torch's other optimizers."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
    ) -> None:
        for index, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if eps <= 0:
            raise ValueError(f"Invalid epsilon value: {eps}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                rows, values = rows_of(parameter.grad)
                values = -values if group["maximize"] else values
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                mean = state["exp_avg"][rows].lerp_(values, 1 - first)
                square = state["exp_avg_sq"][rows].lerp_(values.square(), 1 - second)
                state["exp_avg"].index_copy_(0, rows, mean)
                state["exp_avg_sq"].index_copy_(0, rows, square)
                step = float(state["step"])
                size = group["lr"] * (1 - second**step) ** 0.5 / (1 - first**step)
                update = mean.div_(square.sqrt_().add_(group["eps"])).mul_(-size)
                parameter.index_add_(0, rows, update)


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum per row: the sum of the gradient's mean squares (FBGEMM's EXACT_ROWWISE_ADAGRAD).

    For parameters whose columns are cut, `over` has a function that sums over the ranks with the other columns.
    """

    by_rows = ("sum",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        eps: float = 1e-8,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        if eps < 0:
            raise ValueError(f"Invalid epsilon value: {eps}")
        if initial_accumulator_value < 0:
            raise ValueError(f"Invalid initial_accumulator_value value: {initial_accumulator_value}")
        super().__init__(params, {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value})
        self.over: dict[Tensor, tuple[int, Callable[[Tensor], Tensor]]] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                table = torch.atleast_1d(parameter)
                rows, values = rows_of(torch.atleast_1d(parameter.grad) if not parameter.dim() else parameter.grad)
                state, ones = self.state[parameter], (1,) * (table.dim() - 1)
                if not state:
                    state["sum"] = table.new_full((len(table), *ones), group["initial_accumulator_value"])
                    state["sum"] = state["sum"].view(parameter.shape[:1] + ones)
                sums = torch.atleast_1d(state["sum"])
                held, over = self.over.get(parameter, (table.shape[1:].numel(), lambda x: x))
                squares = over(values.square().unsqueeze(-1).flatten(1).sum(1))
                total = sums[rows].add_(squares.div_(held).view(-1, *ones))
                sums.index_copy_(0, rows, total)
                table.index_add_(0, rows, values.div(total.sqrt_().add_(group["eps"])).mul_(-group["lr"]))
