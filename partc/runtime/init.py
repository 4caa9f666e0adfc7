"""Initial parameters: exactly what the single-device model has after `torch.manual_seed(seed)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .data import call_with_options

Take = Callable[[str, Tensor], None]


def initialise(module: ModuleType, options: Mapping[str, Any], seed: int, take: Take) -> None:
    """Hand every parameter and buffer of the model to `take(name, tensor)`, whole, once, under each of its names."""
    torch.manual_seed(seed)
    model: nn.Module = call_with_options(module.model, options)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        take(name, parameter.detach())
    for name, buffer in model.named_buffers(remove_duplicate=False):
        take(name, buffer)
