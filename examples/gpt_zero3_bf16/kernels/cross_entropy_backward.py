"""Rows of 128, emitted by partc for these operations:

grad_nll_1 = reshape(grad_nll_sum, (1,))  # gpt.py:131
grad_nll_2 = reshape(grad_nll_1, (1, 1))  # gpt.py:131
grad_nll = expand(grad_nll_2, (8, 32))  # gpt.py:131
logits_wide = to(logits, <f32>)  # gpt.py:109
grad_logits_wide = cross_entropy_backward(
    grad_nll, logits_wide, labels, nll_lse, None, -100, 0.0, axis="tp"
)  # gpt.py:109
grad_logits = to(grad_logits_wide, <bf16>)  # gpt.py:109
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import functions
from .scratch import scratch

CONFIGURATION = {"COLUMNS": 128, "ROWS": 32, "num_warps": 8}  # or a faster candidate
CANDIDATES = (
    {"COLUMNS": 128, "ROWS": 32, "num_warps": 8},
    {"COLUMNS": 128, "ROWS": 32, "num_warps": 4},
)


@triton.jit
def _cross_entropy_backward(
    grad_nll_sum_ptr,
    logits_ptr,
    labels_ptr,
    labels_stride_0,
    labels_stride_1,
    nll_lse_ptr,
    tp_rank,
    grad_logits_ptr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    row = (program * ROWS + tl.arange(0, ROWS))[:, None]
    row_0 = row // 32
    row_1 = row % 32
    grad_nll_sum = tl.load(grad_nll_sum_ptr)
    logits = tl.load(logits_ptr + row * 128 + column).to(tl.float32)
    labels = tl.load(labels_ptr + row_0.to(tl.int64) * labels_stride_0 + row_1.to(tl.int64) * labels_stride_1)
    nll_lse = tl.load(nll_lse_ptr + row)
    grad_logits_wide = functions.cross_entropy_backward(
        grad_nll_sum, logits, nll_lse, labels == (-100), labels - tp_rank * 128 == column
    )
    tl.store(grad_logits_ptr + row * 128 + column, grad_logits_wide.to(tl.bfloat16))


def cross_entropy_backward(
    grad_nll_sum: Tensor, logits: Tensor, labels: Tensor, nll_lse: Tensor, tp_rank: int
) -> Tensor:
    """Moves 131.0 KiB; its operations one by one would move 644.0 KiB."""
    grad_logits = logits  # which nobody reads any more
    _cross_entropy_backward[(8,)](
        grad_nll_sum, logits, labels, labels.stride(0), labels.stride(1), nll_lse, tp_rank, grad_logits, **CONFIGURATION
    )
    return grad_logits


def trial(device: torch.device) -> Callable[[], object]:
    """A launch in separate memory, to time candidates (runtime/train/tuning.py)."""
    given = (
        scratch((), torch.float32, device),
        scratch((8, 32, 128), torch.bfloat16, device),
        scratch((8, 32), torch.int64, device),
        scratch((8, 32), torch.float32, device),
        0,
    )
    return lambda: cross_entropy_backward(*given)
