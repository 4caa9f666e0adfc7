"""The types in which packages hold the tensors of a model."""

from __future__ import annotations

import torch
from torch import Tensor


def held_in(precision: str) -> torch.dtype:
    """The dtype of parameters and of the trace; lower precision is introduced later, where it is safe."""
    return torch.float64 if precision == "fp64" else torch.float32


def dtype_held(given: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor is held: `dtype` for floats, its complex counterpart for complex tensors, else
    `given`.
    """
    if given.is_complex:
        return dtype.to_complex()
    return dtype if given.is_floating_point else given


def as_real(x: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers in a new last dimension, as in packages; other tensors unchanged."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
