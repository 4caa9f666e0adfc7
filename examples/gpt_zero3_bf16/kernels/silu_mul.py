"""One pass over memory, emitted by partc for these operations:

mlp_silu = silu(mlp_gate)  # gpt.py:76
mlp_hidden = mul(mlp_silu, mlp_up)  # gpt.py:76
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import functions
from .scratch import scratch

CONFIGURATION = {"BLOCK": 1024, "num_warps": 4}  # or a faster candidate
CANDIDATES = (
    {"BLOCK": 1024, "num_warps": 4},
    {"BLOCK": 512, "num_warps": 4},
    {"BLOCK": 2048, "num_warps": 4},
    {"BLOCK": 2048, "num_warps": 8},
)


@triton.jit
def _silu_mul(mlp_gate_ptr, mlp_up_ptr, mlp_hidden_ptr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mlp_gate = tl.load(mlp_gate_ptr + index).to(tl.float32)
    mlp_silu = functions.silu(mlp_gate)
    mlp_up = tl.load(mlp_up_ptr + index).to(tl.float32)
    mlp_hidden = mlp_silu * mlp_up
    tl.store(mlp_hidden_ptr + index, mlp_hidden.to(tl.bfloat16))


def silu_mul(mlp_gate: Tensor, mlp_up: Tensor) -> Tensor:
    """Moves 132.0 KiB; its operations one by one would move 220.0 KiB."""
    mlp_hidden = torch.empty((32, 8, 88), dtype=torch.bfloat16, device=mlp_gate.device)
    _silu_mul[(triton.cdiv(22528, CONFIGURATION["BLOCK"]),)](mlp_gate, mlp_up, mlp_hidden, **CONFIGURATION)
    return mlp_hidden


def trial(device: torch.device) -> Callable[[], object]:
    """A launch in separate memory, to time candidates (runtime/train/tuning.py)."""
    given = (
        scratch((32, 8, 88), torch.bfloat16, device),
        scratch((32, 8, 88), torch.bfloat16, device),
    )
    return lambda: silu_mul(*given)
