"""One pass over memory, emitted by partc for these operations:

nll_lse = log_sum_exp(nll_max, nll_sums)  # gpt.py:131
nll = cross_entropy_rows(nll_lse, nll_picked, labels, None, -100, 0.0, None, 256)  # gpt.py:131
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import functions
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
def _log_sum_exp_cross_entropy_rows(
    nll_max_ptr,
    nll_sums_ptr,
    nll_picked_ptr,
    labels_ptr,
    labels_stride_0,
    labels_stride_1,
    nll_lse_ptr,
    nll_ptr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < 256
    x0 = index // 32
    x1 = index % 32
    nll_max = tl.load(nll_max_ptr + index, mask=mask)
    nll_sums = tl.load(nll_sums_ptr + index, mask=mask)
    nll_lse = nll_max + tl.log(nll_sums)
    nll_picked = tl.load(nll_picked_ptr + index, mask=mask)
    labels = tl.load(labels_ptr + x0.to(tl.int64) * labels_stride_0 + x1.to(tl.int64) * labels_stride_1, mask=mask)
    nll = functions.row_loss(nll_lse, nll_picked, labels == (-100))
    tl.store(nll_lse_ptr + index, nll_lse, mask=mask)
    tl.store(nll_ptr + index, nll, mask=mask)


def log_sum_exp_cross_entropy_rows(
    nll_max: Tensor, nll_sums: Tensor, nll_picked: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Moves 7.0 KiB; its operations one by one would move 8.0 KiB."""
    nll_lse = torch.empty((8, 32), dtype=torch.float32, device=nll_max.device)
    nll = torch.empty((8, 32), dtype=torch.float32, device=nll_max.device)
    _log_sum_exp_cross_entropy_rows[(triton.cdiv(256, CONFIGURATION["BLOCK"]),)](
        nll_max, nll_sums, nll_picked, labels, labels.stride(0), labels.stride(1), nll_lse, nll, **CONFIGURATION
    )
    return nll_lse, nll


def trial(device: torch.device) -> Callable[[], object]:
    """A launch in separate memory, to time candidates (runtime/train/tuning.py)."""
    given = (
        scratch((8, 32), torch.float32, device),
        scratch((8, 32), torch.float32, device),
        scratch((8, 32), torch.float32, device),
        scratch((8, 32), torch.int64, device),
    )
    return lambda: log_sum_exp_cross_entropy_rows(*given)
