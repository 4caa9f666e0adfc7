"""Region rotary.

Emitted by partc from model.py for pp=2,dp=2,tp=2. Comments give the whole tensor's type:

    f32[16@dp,mb, 64]  each rank has its part of the 16 rows: dp cuts them, and mb, the microbatches, once more
    partial(tp)        each rank of tp has a contribution, which is still to be combined with the others
    vary(tp)           equal on the ranks of tp, which use it differently: its gradient is their sum
"""

import torch
from runtime.comm.comm import Comm
from torch import Tensor


def rotary(
    comm: Comm,
) -> tuple[Tensor, Tensor]:
    """A constant of the model (gpt.py:105)."""
    arange = torch.arange(0, 16, 2, device=comm.device)  # i64[8]
    neg = -arange  # i64[8]
    neg_2 = neg.to(torch.float32)  # f32[8]
    div = neg_2 / 16  # f32[8]
    pow = 500000.0**div  # f32[8]
    arange_2 = torch.arange(32, device=comm.device)  # i64[32]
    cat = torch.cat((pow, pow))  # f32[16]
    outer = torch.outer(arange_2, cat)  # f32[32, 16]
    cos = outer.cos()  # f32[32, 16]
    sin = outer.sin()  # f32[32, 16]
    return cos, sin
