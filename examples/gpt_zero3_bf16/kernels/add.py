"""One pass over memory, emitted by partc for these operations:

grad_norm1_full_3 = add(grad_norm1_full_1, grad_norm1_full_2)  # gpt.py:58
grad_norm1_full = add(grad_norm1_full_3, grad_norm1_full_4)  # gpt.py:58
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
def _add(grad_norm1_full_1_ptr, grad_norm1_full_2_ptr, grad_norm1_full_4_ptr, grad_norm1_full_ptr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    grad_norm1_full_1 = tl.load(grad_norm1_full_1_ptr + index).to(tl.float32)
    grad_norm1_full_2 = tl.load(grad_norm1_full_2_ptr + index).to(tl.float32)
    grad_norm1_full_3 = grad_norm1_full_1 + grad_norm1_full_2
    grad_norm1_full_4 = tl.load(grad_norm1_full_4_ptr + index).to(tl.float32)
    grad_norm1_full = grad_norm1_full_3 + grad_norm1_full_4
    tl.store(grad_norm1_full_ptr + index, grad_norm1_full.to(tl.bfloat16))


def add(grad_norm1_full_1: Tensor, grad_norm1_full_2: Tensor, grad_norm1_full_4: Tensor) -> Tensor:
    """Moves 128.0 KiB; its operations one by one would move 192.0 KiB."""
    grad_norm1_full = torch.empty((32, 8, 64), dtype=torch.bfloat16, device=grad_norm1_full_1.device)
    _add[(triton.cdiv(16384, CONFIGURATION["BLOCK"]),)](
        grad_norm1_full_1, grad_norm1_full_2, grad_norm1_full_4, grad_norm1_full, **CONFIGURATION
    )
    return grad_norm1_full


def trial(device: torch.device) -> Callable[[], object]:
    """A launch in separate memory, to time candidates (runtime/train/tuning.py)."""
    given = (
        scratch((32, 8, 64), torch.bfloat16, device),
        scratch((32, 8, 64), torch.bfloat16, device),
        scratch((32, 8, 64), torch.bfloat16, device),
    )
    return lambda: add(*given)
