"""One pass over memory, emitted by partc for these operations:

nll_sums_partial_below = sub(nll_max_partial, nll_max)  # gpt.py:131
nll_sums_partial_factor = exp(nll_sums_partial_below)  # gpt.py:131
nll_sums_partial = mul(nll_sums_partial_own, nll_sums_partial_factor)  # gpt.py:131
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .scratch import scratch

CONFIGURATION = {"BLOCK": 1024, "num_warps": 4}  # or a faster candidate
CANDIDATES = (
    {"BLOCK": 1024, "num_warps": 4},
    {"BLOCK": 512, "num_warps": 4},
    {"BLOCK": 2048, "num_warps": 4},
    {"BLOCK": 2048, "num_warps": 8},
    {"BLOCK": 4096, "num_warps": 8},
)


@triton.jit
def _sub_exp_mul(nll_max_partial_ptr, nll_max_ptr, nll_sums_partial_own_ptr, nll_sums_partial_ptr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < 256
    nll_sums_partial_own = tl.load(nll_sums_partial_own_ptr + index, mask=mask)
    nll_max_partial = tl.load(nll_max_partial_ptr + index, mask=mask)
    nll_max = tl.load(nll_max_ptr + index, mask=mask)
    nll_sums_partial_below = nll_max_partial - nll_max
    nll_sums_partial_factor = tl.exp(nll_sums_partial_below)
    nll_sums_partial = nll_sums_partial_own * nll_sums_partial_factor
    tl.store(nll_sums_partial_ptr + index, nll_sums_partial, mask=mask)


def sub_exp_mul(nll_max_partial: Tensor, nll_max: Tensor, nll_sums_partial_own: Tensor) -> Tensor:
    """Moves 4.0 KiB; its operations one by one would move 8.0 KiB."""
    nll_sums_partial = torch.empty((8, 32), dtype=torch.float32, device=nll_max_partial.device)
    _sub_exp_mul[(triton.cdiv(256, CONFIGURATION["BLOCK"]),)](
        nll_max_partial, nll_max, nll_sums_partial_own, nll_sums_partial, **CONFIGURATION
    )
    return nll_sums_partial


def trial(device: torch.device) -> Callable[[], object]:
    """A launch in separate memory, to time candidates (runtime/train/tuning.py)."""
    given = (
        scratch((8, 32), torch.float32, device),
        scratch((8, 32), torch.float32, device),
        scratch((8, 32), torch.float32, device),
    )
    return lambda: sub_exp_mul(*given)
