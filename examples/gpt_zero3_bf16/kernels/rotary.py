"""One pass over memory, emitted by partc for these operations:

attn_wq_2 = reshape(attn_wq, (32, 8, 2, 16))  # gpt.py:58
attn_q = permute(attn_wq_2, (1, 2, 0, 3))  # gpt.py:58
attn_q_wide = to(attn_q, <f32>)  # gpt.py:58
attn_q_2_first = slice(attn_q_wide, 3, 0, 8, 1)  # gpt.py:61
attn_q_2_second = slice(attn_q_wide, 3, 8, 16, 1)  # gpt.py:61
attn_q_2_neg = neg(attn_q_2_second)  # gpt.py:61
attn_q_2_rotated = cat((attn_q_2_neg, attn_q_2_first), 3)  # gpt.py:61
attn_q_2_mul = mul(attn_q_wide, cos)  # gpt.py:61
attn_q_2_mul_2 = mul(attn_q_2_rotated, sin)  # gpt.py:61
attn_q_2 = add(attn_q_2_mul, attn_q_2_mul_2)  # gpt.py:61
attn_q_2_bf16 = to(attn_q_2, <bf16>)  # gpt.py:61
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
def _rotary(attn_wq_ptr, cos_ptr, sin_ptr, attn_q_2_bf16_ptr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x0 = index // 512
    x1 = index // 16 % 32
    x2 = index % 16
    attn_wq = tl.load(attn_wq_ptr + x1 * 256 + x0 * 16 + x2).to(tl.float32)
    cos = tl.load(cos_ptr + x1 * 16 + x2)
    attn_q_2_mul = attn_wq * cos
    attn_wq_2 = tl.load(attn_wq_ptr + x1 * 256 + x0 * 16 + x2 + 8, mask=x2 < 8, other=0).to(tl.float32)
    attn_q_2_neg = -attn_wq_2
    attn_wq_3 = tl.load(attn_wq_ptr + x1 * 256 + x0 * 16 + x2 - 8, mask=x2 >= 8, other=0).to(tl.float32)
    attn_q_2_rotated = tl.where(x2 < 8, attn_q_2_neg, attn_wq_3)
    sin = tl.load(sin_ptr + x1 * 16 + x2)
    attn_q_2_mul_2 = attn_q_2_rotated * sin
    attn_q_2 = attn_q_2_mul + attn_q_2_mul_2
    tl.store(attn_q_2_bf16_ptr + index, attn_q_2.to(tl.bfloat16))


def rotary(attn_wq: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Moves 36.0 KiB; its operations one by one would move 420.0 KiB."""
    attn_q_2_bf16 = torch.empty((8, 2, 32, 16), dtype=torch.bfloat16, device=attn_wq.device)
    _rotary[(triton.cdiv(8192, CONFIGURATION["BLOCK"]),)](attn_wq, cos, sin, attn_q_2_bf16, **CONFIGURATION)
    return attn_q_2_bf16


def trial(device: torch.device) -> Callable[[], object]:
    """A launch in separate memory, to time candidates (runtime/train/tuning.py)."""
    given = (
        scratch((32, 8, 32), torch.bfloat16, device),
        scratch((32, 16), torch.float32, device),
        scratch((32, 16), torch.float32, device),
    )
    return lambda: rotary(*given)
