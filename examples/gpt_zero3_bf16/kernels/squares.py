"""The sum of squares of flat memory, emitted by partc: each number is read once, 4 bytes.

Each program sums a block in fp64 and writes its part, so that the sum is the same in every run.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .scratch import scratch

CONFIGURATION = {"BLOCK": 4096, "num_warps": 4}  # or a faster candidate
INTERPRETED = {"BLOCK": 65536, "num_warps": 4}
CANDIDATES = (
    {"BLOCK": 4096, "num_warps": 4},
    {"BLOCK": 8192, "num_warps": 4},
    {"BLOCK": 8192, "num_warps": 8},
    {"BLOCK": 16384, "num_warps": 8},
)


@triton.jit
def _squares(x_ptr, parts_ptr, count, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    index = program * BLOCK + tl.arange(0, BLOCK)
    if (program + 1) * BLOCK <= count:
        x = tl.load(x_ptr + index).to(tl.float64)
    else:
        x = tl.load(x_ptr + index, mask=index < count, other=0).to(tl.float64)
    tl.store(parts_ptr + program, tl.sum(x * x, 0))


def squares(x: Tensor) -> Tensor:
    """The sum of squares of a flat tensor, in fp64, on its device."""
    how = CONFIGURATION if x.is_cuda else INTERPRETED
    parts = torch.empty(triton.cdiv(x.numel(), how["BLOCK"]), dtype=torch.float64, device=x.device)
    _squares[(parts.numel(),)](x, parts, x.numel(), **how)
    return parts.sum()


def trial(device: torch.device) -> Callable[[], object]:
    """A launch in separate memory, to time candidates (runtime/train/tuning.py)."""
    given = (
        scratch((16777216,), torch.float32, device),
    )
    return lambda: squares(*given)
