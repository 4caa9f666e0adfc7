"""Buffers of single numbers on which a model may branch: flags such as `initialized`, and counters."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def is_flag(x: Tensor) -> bool:
    return x.dtype is torch.bool and x.numel() == 1


def is_counter(x: Tensor) -> bool:
    return x.dtype in _INTEGERS and x.numel() == 1
