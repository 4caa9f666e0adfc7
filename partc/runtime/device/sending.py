"""Between the host and the device: copies that the host does not wait for, and the wait where one is wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def send(numbers: Any, there: Tensor) -> None:
    """Write numbers, of nested sequences or a tensor of the host, into a tensor of their shape."""
    here = torch.as_tensor(numbers, dtype=there.dtype)
    there.copy_(here.pin_memory() if there.is_cuda else here, non_blocking=True)


def bring(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device: itself, where that is the host."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def finish(device: torch.device) -> None:
    """Wait until the device has done all that it has been told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
