"""One pass over memory, emitted by partc for these operations:

grad_attn_k_2 = to(grad_attn_k_2_bf16, <f32>)  # gpt.py:62
grad_attn_k_wide_mul = mul(grad_attn_k_2, sin)  # gpt.py:59
grad_attn_k_wide_first = slice(grad_attn_k_wide_mul, 3, 0, 8, 1)  # gpt.py:59
grad_attn_k_wide_second = slice(grad_attn_k_wide_mul, 3, 8, 16, 1)  # gpt.py:59
grad_attn_k_wide_neg = neg(grad_attn_k_wide_first)  # gpt.py:59
grad_attn_k_wide_rotated = cat((grad_attn_k_wide_second, grad_attn_k_wide_neg), 3)  # gpt.py:59
grad_attn_k_wide_mul_2 = mul(grad_attn_k_2, cos)  # gpt.py:59
grad_attn_k_wide = add(grad_attn_k_wide_mul_2, grad_attn_k_wide_rotated)  # gpt.py:59
grad_attn_k = to(grad_attn_k_wide, <bf16>)  # gpt.py:59
grad_attn_wk_2 = permute(grad_attn_k, (2, 0, 1, 3))  # gpt.py:59
grad_attn_wk = reshape(grad_attn_wk_2, (32, 8, 16))  # gpt.py:59
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
def _rotary_backward(
    grad_attn_k_2_bf16_ptr,
    grad_attn_k_2_bf16_stride_0,
    grad_attn_k_2_bf16_stride_2,
    grad_attn_k_2_bf16_stride_3,
    sin_ptr,
    cos_ptr,
    grad_attn_wk_ptr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x0 = index // 128
    x1 = index // 16 % 8
    x2 = index % 16
    grad_attn_k_2_bf16_place = x1.to(tl.int64) * grad_attn_k_2_bf16_stride_0
    grad_attn_k_2_bf16_place += x0.to(tl.int64) * grad_attn_k_2_bf16_stride_2
    grad_attn_k_2_bf16_place += x2.to(tl.int64) * grad_attn_k_2_bf16_stride_3
    grad_attn_k_2_bf16 = tl.load(grad_attn_k_2_bf16_ptr + grad_attn_k_2_bf16_place).to(tl.float32)
    cos = tl.load(cos_ptr + x0 * 16 + x2)
    grad_attn_k_wide_mul_2 = grad_attn_k_2_bf16 * cos
    grad_attn_k_2_bf16_2_place = x1.to(tl.int64) * grad_attn_k_2_bf16_stride_0
    grad_attn_k_2_bf16_2_place += x0.to(tl.int64) * grad_attn_k_2_bf16_stride_2
    grad_attn_k_2_bf16_2_place += (x2 + 8).to(tl.int64) * grad_attn_k_2_bf16_stride_3
    grad_attn_k_2_bf16_2 = tl.load(grad_attn_k_2_bf16_ptr + grad_attn_k_2_bf16_2_place, mask=x2 < 8, other=0).to(
        tl.float32
    )
    sin = tl.load(sin_ptr + x0 * 16 + x2 + 8, mask=x2 < 8, other=0)
    grad_attn_k_wide_mul = grad_attn_k_2_bf16_2 * sin
    grad_attn_k_2_bf16_3_place = x1.to(tl.int64) * grad_attn_k_2_bf16_stride_0
    grad_attn_k_2_bf16_3_place += x0.to(tl.int64) * grad_attn_k_2_bf16_stride_2
    grad_attn_k_2_bf16_3_place += (x2 - 8).to(tl.int64) * grad_attn_k_2_bf16_stride_3
    grad_attn_k_2_bf16_3 = tl.load(grad_attn_k_2_bf16_ptr + grad_attn_k_2_bf16_3_place, mask=x2 >= 8, other=0).to(
        tl.float32
    )
    sin_2 = tl.load(sin_ptr + x0 * 16 + x2 - 8, mask=x2 >= 8, other=0)
    grad_attn_k_wide_mul_3 = grad_attn_k_2_bf16_3 * sin_2
    grad_attn_k_wide_neg = -grad_attn_k_wide_mul_3
    grad_attn_k_wide_rotated = tl.where(x2 < 8, grad_attn_k_wide_mul, grad_attn_k_wide_neg)
    grad_attn_k_wide = grad_attn_k_wide_mul_2 + grad_attn_k_wide_rotated
    tl.store(grad_attn_wk_ptr + index, grad_attn_k_wide.to(tl.bfloat16))


def rotary_backward(grad_attn_k_2_bf16: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Moves 20.0 KiB; its operations one by one would move 212.0 KiB."""
    grad_attn_wk = torch.empty((32, 8, 16), dtype=torch.bfloat16, device=grad_attn_k_2_bf16.device)
    _rotary_backward[(triton.cdiv(4096, CONFIGURATION["BLOCK"]),)](
        grad_attn_k_2_bf16,
        grad_attn_k_2_bf16.stride(0),
        grad_attn_k_2_bf16.stride(2),
        grad_attn_k_2_bf16.stride(3),
        sin,
        cos,
        grad_attn_wk,
        **CONFIGURATION,
    )
    return grad_attn_wk


def trial(device: torch.device) -> Callable[[], object]:
    """A launch in separate memory, to time candidates (runtime/train/tuning.py)."""
    given = (
        scratch((8, 1, 32, 16), torch.bfloat16, device),
        scratch((32, 16), torch.float32, device),
        scratch((32, 16), torch.float32, device),
    )
    return lambda: rotary_backward(*given)
