"""Copies between host and device for which the host does not wait, and an explicit wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def send(numbers: Any, there: Tensor) -> None:
    """Write numbers (nested sequences or a host tensor) into a device tensor of their shape, asynchronously."""
    here = torch.as_tensor(numbers, dtype=there.dtype)
    there.copy_(here.pin_memory() if there.is_cuda else here, non_blocking=True)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device; the tensor itself if the device is the host."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def finish(device: torch.device) -> None:
    """Wait until the device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
