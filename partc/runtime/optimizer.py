"""torch's own optimizers on this rank's shards: both are elementwise, so shards need no communication."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def make_optimizer(name: str, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """`adamw` or `sgd` with torch's defaults; fused, so that a step reads and writes each tensor once."""
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    if name not in kinds:
        raise ValueError(f"no optimizer {name!r}: there are {', '.join(kinds)}")
    optimizer: torch.optim.Optimizer = _undecorated(kinds[name])(list(parameters), lr=lr, fused=True)
    return optimizer


def attach_gradients(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> list[Tensor]:
    """Make each gradient buffer its parameter's `.grad`; returns the parameters that have one."""
    for name, gradient in gradients.items():
        parameters[name].grad = gradient
    return [parameters[name] for name in gradients]


def _undecorated(kind: type[Any]) -> type[Any]:
    """The same class without what guards its methods from torch.compile.

    The guards import the compiler on their first call: nearly a second, on every rank.
    """
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in ("step", "add_param_group")}
    return type(kind.__name__, (kind,), methods)
