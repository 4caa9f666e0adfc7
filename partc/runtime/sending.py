"""Numbers of the host to memory of the device that stands where it is, without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def send(numbers: Any, there: Tensor) -> None:
    """Write numbers, of nested sequences or a tensor of the host, into a tensor of their shape."""
    here = torch.as_tensor(numbers, dtype=there.dtype)
    there.copy_(here.pin_memory() if there.is_cuda else here, non_blocking=True)
