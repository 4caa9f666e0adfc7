"""One pass over memory, emitted by partc for these operations:

grad_attn_q_2 = to(grad_attn_q_2_bf16, <f32>)  # gpt.py:61
grad_attn_q_wide_mul = mul(grad_attn_q_2, sin)  # gpt.py:58
grad_attn_q_wide_first = slice(grad_attn_q_wide_mul, 3, 0, 8, 1)  # gpt.py:58
grad_attn_q_wide_second = slice(grad_attn_q_wide_mul, 3, 8, 16, 1)  # gpt.py:58
grad_attn_q_wide_neg = neg(grad_attn_q_wide_first)  # gpt.py:58
grad_attn_q_wide_rotated = cat((grad_attn_q_wide_second, grad_attn_q_wide_neg), 3)  # gpt.py:58
grad_attn_q_wide_mul_2 = mul(grad_attn_q_2, cos)  # gpt.py:58
grad_attn_q_wide = add(grad_attn_q_wide_mul_2, grad_attn_q_wide_rotated)  # gpt.py:58
grad_attn_q = to(grad_attn_q_wide, <bf16>)  # gpt.py:58
grad_attn_wq_2 = permute(grad_attn_q, (2, 0, 1, 3))  # gpt.py:58
grad_attn_wq = reshape(grad_attn_wq_2, (32, 8, 32))  # gpt.py:58
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
def _rotary_backward_2(
    grad_attn_q_2_bf16_ptr,
    grad_attn_q_2_bf16_stride_0,
    grad_attn_q_2_bf16_stride_1,
    grad_attn_q_2_bf16_stride_2,
    grad_attn_q_2_bf16_stride_3,
    sin_ptr,
    cos_ptr,
    grad_attn_wq_ptr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x0 = index // 256
    x1 = index // 32 % 8
    x2 = index // 16 % 2
    x3 = index % 16
    grad_attn_q_2_bf16_place = x1.to(tl.int64) * grad_attn_q_2_bf16_stride_0
    grad_attn_q_2_bf16_place += x2.to(tl.int64) * grad_attn_q_2_bf16_stride_1
    grad_attn_q_2_bf16_place += x0.to(tl.int64) * grad_attn_q_2_bf16_stride_2
    grad_attn_q_2_bf16_place += x3.to(tl.int64) * grad_attn_q_2_bf16_stride_3
    grad_attn_q_2_bf16 = tl.load(grad_attn_q_2_bf16_ptr + grad_attn_q_2_bf16_place).to(tl.float32)
    cos = tl.load(cos_ptr + x0 * 16 + x3)
    grad_attn_q_wide_mul_2 = grad_attn_q_2_bf16 * cos
    grad_attn_q_2_bf16_2_place = x1.to(tl.int64) * grad_attn_q_2_bf16_stride_0
    grad_attn_q_2_bf16_2_place += x2.to(tl.int64) * grad_attn_q_2_bf16_stride_1
    grad_attn_q_2_bf16_2_place += x0.to(tl.int64) * grad_attn_q_2_bf16_stride_2
    grad_attn_q_2_bf16_2_place += (x3 + 8).to(tl.int64) * grad_attn_q_2_bf16_stride_3
    grad_attn_q_2_bf16_2 = tl.load(grad_attn_q_2_bf16_ptr + grad_attn_q_2_bf16_2_place, mask=x3 < 8, other=0).to(
        tl.float32
    )
    sin = tl.load(sin_ptr + x0 * 16 + x3 + 8, mask=x3 < 8, other=0)
    grad_attn_q_wide_mul = grad_attn_q_2_bf16_2 * sin
    grad_attn_q_2_bf16_3_place = x1.to(tl.int64) * grad_attn_q_2_bf16_stride_0
    grad_attn_q_2_bf16_3_place += x2.to(tl.int64) * grad_attn_q_2_bf16_stride_1
    grad_attn_q_2_bf16_3_place += x0.to(tl.int64) * grad_attn_q_2_bf16_stride_2
    grad_attn_q_2_bf16_3_place += (x3 - 8).to(tl.int64) * grad_attn_q_2_bf16_stride_3
    grad_attn_q_2_bf16_3 = tl.load(grad_attn_q_2_bf16_ptr + grad_attn_q_2_bf16_3_place, mask=x3 >= 8, other=0).to(
        tl.float32
    )
    sin_2 = tl.load(sin_ptr + x0 * 16 + x3 - 8, mask=x3 >= 8, other=0)
    grad_attn_q_wide_mul_3 = grad_attn_q_2_bf16_3 * sin_2
    grad_attn_q_wide_neg = -grad_attn_q_wide_mul_3
    grad_attn_q_wide_rotated = tl.where(x3 < 8, grad_attn_q_wide_mul, grad_attn_q_wide_neg)
    grad_attn_q_wide = grad_attn_q_wide_mul_2 + grad_attn_q_wide_rotated
    tl.store(grad_attn_wq_ptr + index, grad_attn_q_wide.to(tl.bfloat16))


def rotary_backward_2(grad_attn_q_2_bf16: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Moves 36.0 KiB; its operations one by one would move 420.0 KiB."""
    grad_attn_wq = torch.empty((32, 8, 32), dtype=torch.bfloat16, device=grad_attn_q_2_bf16.device)
    _rotary_backward_2[(triton.cdiv(8192, CONFIGURATION["BLOCK"]),)](
        grad_attn_q_2_bf16,
        grad_attn_q_2_bf16.stride(0),
        grad_attn_q_2_bf16.stride(1),
        grad_attn_q_2_bf16.stride(2),
        grad_attn_q_2_bf16.stride(3),
        sin,
        cos,
        grad_attn_wq,
        **CONFIGURATION,
    )
    return grad_attn_wq


def trial(device: torch.device) -> Callable[[], object]:
    """A launch in separate memory, to time candidates (runtime/train/tuning.py)."""
    given = (
        scratch((8, 2, 32, 16), torch.bfloat16, device),
        scratch((32, 16), torch.float32, device),
        scratch((32, 16), torch.float32, device),
    )
    return lambda: rotary_backward_2(*given)
