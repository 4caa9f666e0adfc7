"""torch's own optimizers on this rank's shards: both are elementwise, so shards need no communication."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor


def make_optimizer(name: str, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """`adamw` or `sgd` with torch's defaults; fused, so that a step reads and writes each tensor once."""
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    if name not in kinds:
        raise ValueError(f"no optimizer {name!r}: there are {', '.join(kinds)}")
    return kinds[name](list(parameters), lr=lr, fused=True)


def attach_gradients(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> list[Tensor]:
    """Make each gradient buffer its parameter's `.grad`; returns the parameters that have one."""
    for name, gradient in gradients.items():
        parameters[name].grad = gradient
    return [parameters[name] for name in gradients]
