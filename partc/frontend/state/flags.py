"""Flags: buffers of single booleans, such as `initialized`, on which a model may branch."""

from __future__ import annotations

import torch
from torch import Tensor


def is_flag(x: Tensor) -> bool:
    return x.dtype is torch.bool and x.numel() == 1
