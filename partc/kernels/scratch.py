"""Memory for the timing of kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, below: int = 2) -> Tensor:
    """A tensor of random numbers; integers are below `below`."""
    x = torch.empty(shape, dtype=dtype, device=device)
    return x.normal_() if dtype.is_floating_point else x.random_(0, below)
