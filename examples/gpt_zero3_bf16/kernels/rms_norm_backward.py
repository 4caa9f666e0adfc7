"""Rows of 64, emitted by partc for these operations:

grad_x_unit = mul(x, norm_rstd)  # gpt.py:109
grad_x_scaled = mul(grad_norm, norm.weight)  # gpt.py:109
grad_x_product = mul(grad_x_scaled, grad_x_unit)  # gpt.py:109
grad_x_along_sum = sum(grad_x_product, (2,), True)  # gpt.py:109
grad_x_along = mul(grad_x_along_sum, 0.015625)  # gpt.py:109
grad_x_part = mul(grad_x_unit, grad_x_along)  # gpt.py:109
grad_x_across = sub(grad_x_scaled, grad_x_part)  # gpt.py:109
grad_x = mul(grad_x_across, norm_rstd)  # gpt.py:109
grad_x_terms = mul(grad_norm, grad_x_unit)  # gpt.py:109
grad_norm.weight = sum(grad_x_terms, (0, 1), False)  # gpt.py:109
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .scratch import scratch

CONFIGURATION = {"COLUMNS": 64, "ROWS": 32, "num_warps": 4}  # or a faster candidate
CANDIDATES = (
    {"COLUMNS": 64, "ROWS": 32, "num_warps": 4},
    {"COLUMNS": 64, "ROWS": 32, "num_warps": 8},
    {"COLUMNS": 64, "ROWS": 32, "num_warps": 2},
)


@triton.jit
def _rms_norm_backward(
    x_ptr,
    norm_rstd_ptr,
    grad_norm_ptr,
    norm_weight_ptr,
    grad_x_ptr,
    grad_norm_weight_parts_ptr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    row = (program * ROWS + tl.arange(0, ROWS))[:, None]
    grad_norm = tl.load(grad_norm_ptr + row * 64 + column).to(tl.float32)
    norm_weight = tl.load(norm_weight_ptr + column).to(tl.float32)
    grad_x_scaled = grad_norm * norm_weight
    x = tl.load(x_ptr + row * 64 + column).to(tl.float32)
    norm_rstd = tl.load(norm_rstd_ptr + row)
    grad_x_unit = x * norm_rstd
    grad_x_product = grad_x_scaled * grad_x_unit
    grad_x_along_sum = tl.sum(grad_x_product, axis=1, keep_dims=True)
    grad_x_along = grad_x_along_sum * 0.015625
    grad_x_part = grad_x_unit * grad_x_along
    grad_x_across = grad_x_scaled - grad_x_part
    grad_x = grad_x_across * norm_rstd
    grad_x_terms = grad_norm * grad_x_unit
    tl.store(grad_x_ptr + row * 64 + column, grad_x.to(tl.bfloat16))
    grad_norm_weight_total = tl.sum(grad_x_terms, axis=0, keep_dims=True)
    tl.store(grad_norm_weight_parts_ptr + program * 64 + column, grad_norm_weight_total)


def rms_norm_backward(
    x: Tensor, norm_rstd: Tensor, grad_norm: Tensor, norm_weight: Tensor, *, summed: bool = True
) -> tuple[Tensor, Tensor]:
    """Moves 48.8 KiB; its operations one by one would move 547.2 KiB. With summed=False, the last results are partial sums, one for each program."""
    grad_x = torch.empty((8, 16, 64), dtype=torch.bfloat16, device=x.device)
    grad_norm_weight_parts = torch.empty((4, 64), dtype=torch.float32, device=x.device)
    _rms_norm_backward[(4,)](x, norm_rstd, grad_norm, norm_weight, grad_x, grad_norm_weight_parts, **CONFIGURATION)
    if not summed:
        return grad_x, grad_norm_weight_parts
    return grad_x, grad_norm_weight_parts.sum(0).to(torch.bfloat16)


def trial(device: torch.device) -> Callable[[], object]:
    """A launch in separate memory, to time candidates (runtime/train/tuning.py)."""
    given = (
        scratch((8, 16, 64), torch.bfloat16, device),
        scratch((8, 16, 1), torch.float32, device),
        scratch((8, 16, 64), torch.bfloat16, device),
        scratch((64,), torch.bfloat16, device),
    )
    return lambda: rms_norm_backward(*given)
