"""The update of routers' biases by the load of their experts, in place of a balancing loss.

Wang et al. 2024, Auxiliary-Loss-Free Load Balancing, algorithm 1; DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BALANCE = "balance"
_EQUAL = 2.0**-22  # share of the largest load below which differences count as fp32 rounding


class Balance(torch.optim.Optimizer):
    """Raises the biases of experts with fewer rows than the mean by `rate`, and lowers those of experts with more.

    The gradient is the load, up to a factor. The learning rate has no effect.
    """

    def __init__(self, params: list[Tensor], lr: float = 0.0, rate: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "rate": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for bias in group["params"]:
                load = bias.grad.double()
                missing = load.mean() - load
                missing = torch.where(missing.abs() > _EQUAL * load.amax(), missing, 0)
                bias.add_(missing.sign().to(bias.dtype), alpha=group["rate"])
