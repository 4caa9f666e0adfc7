"""Page-locked host memory, into which a GPU copies asynchronously.

It has the exact size of its contents: torch's own allocator of such memory rounds every tensor up to a power of two.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNED = 64  # bytes
_PORTABLE = 1  # for all contexts of the process: cudaHostRegisterPortable


def pinned(alike: Sequence[Tensor]) -> list[Tensor]:
    """For each tensor, a contiguous pinned one of its shape and dtype; all are in one allocation."""
    places = [0]
    for x in alike:
        places.append(places[-1] + -(-math.prod(x.shape) * x.element_size() // _ALIGNED) * _ALIGNED)
    whole = torch.empty(places[-1], dtype=torch.uint8)
    if whole.numel():
        _pin(whole)
    return [
        whole[place : place + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        for place, x in zip(places, alike, strict=False)
    ]


def _pin(whole: Tensor) -> None:
    """Pin the memory until it is freed."""
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(whole.data_ptr(), whole.nbytes, _PORTABLE))
    if code:
        raise RuntimeError(f"CUDA cannot lock {whole.nbytes} bytes of host memory in place (error {code})")
    weakref.finalize(whole.untyped_storage(), runtime.cudaHostUnregister, whole.data_ptr()).atexit = False
