"""Rows of 128 logits, read once, emitted by partc for these operations:

logits_wide = to(logits, <f32>)  # gpt.py:109
nll_max_partial = shard_max(logits_wide)  # gpt.py:131
nll_picked_partial = pick(logits_wide, labels, axis="tp")  # gpt.py:131
nll_sums_partial_own = sum_exp(logits_wide, nll_max_partial)  # gpt.py:131
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import functions
from .scratch import scratch

CONFIGURATION = {"COLUMNS": 128, "STAGES": 1, "num_warps": 1}  # or a faster candidate
CANDIDATES = (
    {"COLUMNS": 128, "STAGES": 1, "num_warps": 1},
    {"COLUMNS": 128, "STAGES": 1, "num_warps": 2},
    {"COLUMNS": 64, "STAGES": 1, "num_warps": 1},
    {"COLUMNS": 128, "STAGES": 2, "num_warps": 1},
    {"COLUMNS": 64, "STAGES": 2, "num_warps": 1},
    {"COLUMNS": 128, "STAGES": 3, "num_warps": 1},
    {"COLUMNS": 64, "STAGES": 3, "num_warps": 1},
)


@triton.jit
def _cross_entropy(
    logits_ptr,
    labels_ptr,
    labels_stride_0,
    labels_stride_1,
    tp_rank,
    nll_max_partial_ptr,
    nll_picked_partial_ptr,
    nll_sums_partial_own_ptr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0)
    row_0 = row // 32
    row_1 = row % 32
    most = tl.full([COLUMNS], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in tl.range(0, 128, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        logits = tl.load(logits_ptr + row * 128 + column).to(tl.float32)
        most, total = functions.streamed(logits, most, total)
    largest = tl.max(most, 0)
    sums = tl.sum(total * tl.exp(most - largest), 0)
    labels = tl.load(labels_ptr + row_0.to(tl.int64) * labels_stride_0 + row_1.to(tl.int64) * labels_stride_1)
    place = labels - tp_rank * 128
    here = (place >= 0) & (place < 128)
    place = tl.where(here, place, 0)
    logits_2 = tl.load(logits_ptr + row * 128 + place).to(tl.float32)
    picked = tl.where(here, logits_2, 0.0)
    tl.store(nll_max_partial_ptr + row, largest)
    tl.store(nll_picked_partial_ptr + row, picked)
    tl.store(nll_sums_partial_own_ptr + row, sums)


def cross_entropy(logits: Tensor, labels: Tensor, tp_rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Moves 69.0 KiB; its operations one by one would move 582.0 KiB."""
    nll_max_partial = torch.empty((8, 32), dtype=torch.float32, device=logits.device)
    nll_picked_partial = torch.empty((8, 32), dtype=torch.float32, device=logits.device)
    nll_sums_partial_own = torch.empty((8, 32), dtype=torch.float32, device=logits.device)
    _cross_entropy[(256,)](
        logits,
        labels,
        labels.stride(0),
        labels.stride(1),
        tp_rank,
        nll_max_partial,
        nll_picked_partial,
        nll_sums_partial_own,
        **CONFIGURATION,
    )
    return nll_max_partial, nll_picked_partial, nll_sums_partial_own


def trial(device: torch.device) -> Callable[[], object]:
    """A launch in separate memory, to time candidates (runtime/train/tuning.py)."""
    given = (
        scratch((8, 32, 128), torch.bfloat16, device),
        scratch((8, 32), torch.int64, device, 128),
        0,
    )
    return lambda: cross_entropy(*given)
