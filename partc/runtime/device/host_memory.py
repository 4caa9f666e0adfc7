"""Host memory: reuse between steps instead of returning it, and its peak."""

from __future__ import annotations

import ctypes
import resource
import sys

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h


def keep_freed_memory() -> None:
    """Make the C library reuse the memory of large tensors.

    By default, that memory is returned to the system and faulted in again page by page: on CPUs, a tenth of a step's
    time.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only GNU's C library has it
    if mallopt is not None:
        _ = mallopt(_M_MMAP_THRESHOLD, 1 << 30) or mallopt(_M_MMAP_THRESHOLD, 1 << 25)  # the limit in older versions
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def peak_bytes(device: torch.device) -> int:
    """The peak memory so far, in bytes: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
