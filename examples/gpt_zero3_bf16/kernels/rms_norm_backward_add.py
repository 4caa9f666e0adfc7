"""Rows of 64, emitted by partc for these operations:

grad_norm2 = permute(grad_norm2_t, (1, 0, 2))  # gpt.py:90
grad_x_2_1_unit = mul(x_2, norm2_rstd)  # gpt.py:90
grad_x_2_1_scaled = mul(grad_norm2, norm2.weight)  # gpt.py:90
grad_x_2_1_product = mul(grad_x_2_1_scaled, grad_x_2_1_unit)  # gpt.py:90
grad_x_2_1_along_sum = sum(grad_x_2_1_product, (2,), True)  # gpt.py:90
grad_x_2_1_along = mul(grad_x_2_1_along_sum, 0.015625)  # gpt.py:90
grad_x_2_1_part = mul(grad_x_2_1_unit, grad_x_2_1_along)  # gpt.py:90
grad_x_2_1_across = sub(grad_x_2_1_scaled, grad_x_2_1_part)  # gpt.py:90
grad_x_2_1 = mul(grad_x_2_1_across, norm2_rstd)  # gpt.py:90
grad_x_2_1_terms = mul(grad_norm2, grad_x_2_1_unit)  # gpt.py:90
grad_norm2.weight = sum(grad_x_2_1_terms, (0, 1), False)  # gpt.py:90
grad_x_2 = add(grad_y, grad_x_2_1)  # gpt.py:89
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
def _rms_norm_backward_add(
    grad_norm2_t_ptr,
    x_2_ptr,
    norm2_rstd_ptr,
    norm2_weight_ptr,
    grad_y_ptr,
    grad_x_2_ptr,
    grad_norm2_weight_parts_ptr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    row = (program * ROWS + tl.arange(0, ROWS))[:, None]
    row_0 = row // 16
    row_1 = row % 16
    grad_norm2_t = tl.load(grad_norm2_t_ptr + row_1 * 512 + row_0 * 64 + column).to(tl.float32)
    x_2 = tl.load(x_2_ptr + row * 64 + column).to(tl.float32)
    norm2_rstd = tl.load(norm2_rstd_ptr + row)
    grad_x_2_1_unit = x_2 * norm2_rstd
    grad_x_2_1_terms = grad_norm2_t * grad_x_2_1_unit
    grad_y = tl.load(grad_y_ptr + row * 64 + column).to(tl.float32)
    norm2_weight = tl.load(norm2_weight_ptr + column).to(tl.float32)
    grad_x_2_1_scaled = grad_norm2_t * norm2_weight
    grad_x_2_1_product = grad_x_2_1_scaled * grad_x_2_1_unit
    grad_x_2_1_along_sum = tl.sum(grad_x_2_1_product, axis=1, keep_dims=True)
    grad_x_2_1_along = grad_x_2_1_along_sum * 0.015625
    grad_x_2_1_part = grad_x_2_1_unit * grad_x_2_1_along
    grad_x_2_1_across = grad_x_2_1_scaled - grad_x_2_1_part
    grad_x_2_1 = grad_x_2_1_across * norm2_rstd
    grad_x_2 = grad_y + grad_x_2_1
    grad_norm2_weight_total = tl.sum(grad_x_2_1_terms, axis=0, keep_dims=True)
    tl.store(grad_x_2_ptr + row * 64 + column, grad_x_2.to(tl.bfloat16))
    tl.store(grad_norm2_weight_parts_ptr + program * 64 + column, grad_norm2_weight_total)


def rms_norm_backward_add(
    grad_norm2_t: Tensor, x_2: Tensor, norm2_rstd: Tensor, norm2_weight: Tensor, grad_y: Tensor, *, summed: bool = True
) -> tuple[Tensor, Tensor]:
    """Moves 64.8 KiB; its operations one by one would move 595.2 KiB. With summed=False, the last results are partial sums, one for each program."""
    grad_x_2 = torch.empty((8, 16, 64), dtype=torch.bfloat16, device=grad_norm2_t.device)
    grad_norm2_weight_parts = torch.empty((4, 64), dtype=torch.float32, device=grad_norm2_t.device)
    _rms_norm_backward_add[(4,)](
        grad_norm2_t, x_2, norm2_rstd, norm2_weight, grad_y, grad_x_2, grad_norm2_weight_parts, **CONFIGURATION
    )
    if not summed:
        return grad_x_2, grad_norm2_weight_parts
    return grad_norm2_weight_parts.sum(0).to(torch.bfloat16), grad_x_2


def trial(device: torch.device) -> Callable[[], object]:
    """A launch in separate memory, to time candidates (runtime/train/tuning.py)."""
    given = (
        scratch((16, 8, 64), torch.bfloat16, device),
        scratch((8, 16, 64), torch.bfloat16, device),
        scratch((8, 16, 1), torch.float32, device),
        scratch((64,), torch.bfloat16, device),
        scratch((8, 16, 64), torch.bfloat16, device),
    )
    return lambda: rms_norm_backward_add(*given)
