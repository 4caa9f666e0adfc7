"""Region make_count.

Emitted by partc from model.py for pp=2,dp=2,tp=2. Comments give the whole tensor's type:

    f32[16@dp,mb, 64]  each rank has its part of the 16 rows: dp cuts them, and mb, the microbatches, once more
    partial(tp)        each rank of tp has a contribution, which is still to be combined with the others
    vary(tp)           equal on the ranks of tp, which use it differently: its gradient is their sum
"""

import torch
from runtime.comm.comm import Comm
from torch import Tensor


def make_count(
    comm: Comm,
    labels: Tensor,  # i64[16@dp, 32]
) -> Tensor:
    """Counted over the batch, once per step (gpt.py:131)."""
    counted = labels != -100  # bool[16@dp, 32]
    counted_as_number = counted.to(torch.float32)  # f32[16@dp, 32]
    count_partial = counted_as_number.sum(dim=(0, 1))  # f32[] partial(dp)
    # all-reduce 4 B over dp: each rank has a part of the sum in gpt.py:131
    count = comm.dp.all_reduce_(count_partial)  # f32[]
    return count
