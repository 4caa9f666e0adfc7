"""Buffers of single numbers on which a model may branch: flags such as `initialized`, and counters."""

from __future__ import annotations

import torch
from torch import Tensor


def is_flag(x: Tensor) -> bool:
    return x.dtype is torch.bool and x.numel() == 1


def is_counter(x: Tensor) -> bool:
    return x.dtype is not torch.bool and not x.is_complex() and x.numel() == 1
