"""Rows of 64, emitted by partc for these operations:

norm1_square = mul(x, x)  # gpt.py:89
norm1_mean_sum = sum(norm1_square, (2,), True)  # gpt.py:89
norm1_mean = mul(norm1_mean_sum, 0.015625)  # gpt.py:89
norm1_var = add(norm1_mean, 1e-05)  # gpt.py:89
norm1_rstd = rsqrt(norm1_var)  # gpt.py:89
norm1_unit = mul(x, norm1_rstd)  # gpt.py:89
norm1 = mul(norm1_unit, norm1.weight)  # gpt.py:89
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .scratch import scratch

CONFIGURATION = {"COLUMNS": 64, "ROWS": 64, "num_warps": 8}  # or a faster candidate
CANDIDATES = (
    {"COLUMNS": 64, "ROWS": 64, "num_warps": 8},
    {"COLUMNS": 64, "ROWS": 64, "num_warps": 4},
)


@triton.jit
def _rms_norm(x_ptr, norm1_weight_ptr, norm1_ptr, norm1_rstd_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    row = (program * ROWS + tl.arange(0, ROWS))[:, None]
    x = tl.load(x_ptr + row * 64 + column).to(tl.float32)
    norm1_square = x * x
    norm1_mean_sum = tl.sum(norm1_square, axis=1, keep_dims=True)
    norm1_mean = norm1_mean_sum * 0.015625
    norm1_var = norm1_mean + 1e-05
    norm1_rstd = tl.rsqrt(norm1_var)
    norm1_unit = x * norm1_rstd
    norm1_weight = tl.load(norm1_weight_ptr + column).to(tl.float32)
    norm1 = norm1_unit * norm1_weight
    tl.store(norm1_ptr + row * 64 + column, norm1.to(tl.bfloat16))
    tl.store(norm1_rstd_ptr + row, norm1_rstd)


def rms_norm(x: Tensor, norm1_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Moves 32.6 KiB; its operations one by one would move 180.1 KiB."""
    norm1 = torch.empty((8, 16, 64), dtype=torch.bfloat16, device=x.device)
    norm1_rstd = torch.empty((8, 16, 1), dtype=torch.float32, device=x.device)
    _rms_norm[(2,)](x, norm1_weight, norm1, norm1_rstd, **CONFIGURATION)
    return norm1, norm1_rstd


def trial(device: torch.device) -> Callable[[], object]:
    """A launch in separate memory, to time candidates (runtime/train/tuning.py)."""
    given = (
        scratch((8, 16, 64), torch.bfloat16, device),
        scratch((64,), torch.bfloat16, device),
    )
    return lambda: rms_norm(*given)
