"""One pass over memory, emitted by partc for these operations:

attn_wk_2 = reshape(attn_wk, (32, 8, 1, 16))  # gpt.py:59
attn_k = permute(attn_wk_2, (1, 2, 0, 3))  # gpt.py:59
attn_k_wide = to(attn_k, <f32>)  # gpt.py:59
attn_k_2_first = slice(attn_k_wide, 3, 0, 8, 1)  # gpt.py:62
attn_k_2_second = slice(attn_k_wide, 3, 8, 16, 1)  # gpt.py:62
attn_k_2_neg = neg(attn_k_2_second)  # gpt.py:62
attn_k_2_rotated = cat((attn_k_2_neg, attn_k_2_first), 3)  # gpt.py:62
attn_k_2_mul = mul(attn_k_wide, cos)  # gpt.py:62
attn_k_2_mul_2 = mul(attn_k_2_rotated, sin)  # gpt.py:62
attn_k_2 = add(attn_k_2_mul, attn_k_2_mul_2)  # gpt.py:62
attn_k_2_bf16 = to(attn_k_2, <bf16>)  # gpt.py:62
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
def _rotary_2(attn_wk_ptr, cos_ptr, sin_ptr, attn_k_2_bf16_ptr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x0 = index // 512
    x1 = index // 16 % 32
    x2 = index % 16
    attn_wk = tl.load(attn_wk_ptr + x1 * 128 + x0 * 16 + x2).to(tl.float32)
    cos = tl.load(cos_ptr + x1 * 16 + x2)
    attn_k_2_mul = attn_wk * cos
    attn_wk_2 = tl.load(attn_wk_ptr + x1 * 128 + x0 * 16 + x2 + 8, mask=x2 < 8, other=0).to(tl.float32)
    attn_k_2_neg = -attn_wk_2
    attn_wk_3 = tl.load(attn_wk_ptr + x1 * 128 + x0 * 16 + x2 - 8, mask=x2 >= 8, other=0).to(tl.float32)
    attn_k_2_rotated = tl.where(x2 < 8, attn_k_2_neg, attn_wk_3)
    sin = tl.load(sin_ptr + x1 * 16 + x2)
    attn_k_2_mul_2 = attn_k_2_rotated * sin
    attn_k_2 = attn_k_2_mul + attn_k_2_mul_2
    tl.store(attn_k_2_bf16_ptr + index, attn_k_2.to(tl.bfloat16))


def rotary_2(attn_wk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Moves 20.0 KiB; its operations one by one would move 212.0 KiB."""
    attn_k_2_bf16 = torch.empty((8, 1, 32, 16), dtype=torch.bfloat16, device=attn_wk.device)
    _rotary_2[(triton.cdiv(4096, CONFIGURATION["BLOCK"]),)](attn_wk, cos, sin, attn_k_2_bf16, **CONFIGURATION)
    return attn_k_2_bf16


def trial(device: torch.device) -> Callable[[], object]:
    """A launch in separate memory, to time candidates (runtime/train/tuning.py)."""
    given = (
        scratch((32, 8, 16), torch.bfloat16, device),
        scratch((32, 16), torch.float32, device),
        scratch((32, 16), torch.float32, device),
    )
    return lambda: rotary_2(*given)
