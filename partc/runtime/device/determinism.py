"""Bitwise reproducible steps, on GPUs too, by torch's deterministic algorithms.

Without them, a GPU's flash attention and PyTorch's indexed sums add in the order in which blocks finish.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import UsageError

_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS divide work in the same way on every stream
_NONE = "does not have a deterministic implementation"


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """A context for a whole process, entered before it uses a GPU. Operations without a deterministic algorithm fail
    (see `explained_errors`).
    """
    if not wanted:
        yield
        return
    os.environ.setdefault(*_WORKSPACE)
    memory: Any = torch.utils.deterministic
    filled, convolutions = memory.fill_uninitialized_memory, torch.backends.cudnn.deterministic
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # memory is always written before it is read
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        memory.fill_uninitialized_memory = filled
        torch.backends.cudnn.deterministic = convolutions


@contextmanager
def explained_errors() -> Iterator[None]:
    """Raise UsageError P0542 for an operation without a deterministic algorithm, with its name."""
    try:
        yield
    except RuntimeError as error:
        operation, found, _ = str(error).partition(_NONE)
        if not found:
            raise
        raise UsageError(
            "P0542",
            f"--deterministic: {operation.strip()} {_NONE} in torch {torch.__version__}",
            "leave out --deterministic, or have the model do without this operation",
        ) from error
