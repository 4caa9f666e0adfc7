"""Adds rows of 64 to those of a table, emitted by partc for this operation:

grad_embed.weight = embedding_shard_backward(grad_embed_full, ids, 128, axis="tp")  # gpt.py:106

Positions are sorted by their ids, so that the positions of one row of the table are consecutive: a run. A program adds up
32 positions in order. Runs that begin and end among these go to the table at once; of other runs each
program stores its part, and a second kernel adds up the parts, in order too: the same sums in every step.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .scratch import scratch

CONFIGURATION = {"COLUMNS": 64, "num_warps": 1}  # or a faster candidate
CANDIDATES = (
    {"COLUMNS": 64, "num_warps": 1},
    {"COLUMNS": 64, "num_warps": 2},
)


@triton.jit
def _embedding_grad(grad_ptr, ids_ptr, order_ptr, tp_rank, into_ptr, parts_ptr, COLUMNS: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < 64
    start = chunk * 32
    id = tl.load(ids_ptr + start)
    begun_before = (start > 0) & (tl.load(ids_ptr + start - 1, mask=start > 0, other=0) == id)
    total = tl.zeros([COLUMNS], tl.float32)
    for place in range(start, tl.minimum(start + 32, 256)):
        position = tl.load(order_ptr + place)
        total += tl.load(grad_ptr + position * 64 + column, mask=inside).to(tl.float32)
        more = place + 1 < 256
        goes_on = more & (tl.load(ids_ptr + place + 1, mask=more, other=0) == id)
        leaves = place + 1 == start + 32
        row = id.to(tl.int64) - tp_rank * 128
        wanted = (row >= 0) & (row < 128)
        here = into_ptr + row * 64 + column
        adds = inside & wanted & ((goes_on | begun_before) == 0)
        tl.store(here, tl.load(here, mask=adds, other=0).to(tl.float32) + total, mask=adds)
        part = parts_ptr + (chunk * 2 + tl.where(begun_before, 0, 1)) * 64 + column
        tl.store(part, total, mask=inside & tl.where(goes_on, leaves, begun_before))
        total = tl.where(goes_on, total, 0.0)
        begun_before = begun_before & goes_on
        id = tl.load(ids_ptr + place + 1, mask=more, other=0)


@triton.jit
def _embedding_grad_parts(ids_ptr, tp_rank, into_ptr, parts_ptr, COLUMNS: tl.constexpr):
    """Adds up the parts of a run that begins in this program's chunk and ends in a later one."""
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < 64
    start = chunk * 32
    end = start + 32
    id = tl.load(ids_ptr + end - 1)
    row = id.to(tl.int64) - tp_rank * 128
    wanted = (row >= 0) & (row < 128)
    begins = (start == 0) | (tl.load(ids_ptr + start - 1, mask=start > 0, other=0) != id) | (
        tl.load(ids_ptr + start) != id
    )
    if wanted & begins & (tl.load(ids_ptr + end) == id):
        last = chunk + 1
        while tl.load(ids_ptr + (last + 1) * 32, mask=(last + 1) * 32 < 256, other=-1) == id:
            last += 1
        total = tl.load(parts_ptr + (chunk * 2 + 1) * 64 + column, mask=inside)
        for part in range(chunk + 1, last + 1):
            total += tl.load(parts_ptr + part * 128 + column, mask=inside)
        here = into_ptr + row * 64 + column
        tl.store(here, tl.load(here, mask=inside).to(tl.float32) + total, mask=inside)


def embedding_grad(grad_embed_full: Tensor, ids: Tensor, tp_rank: int, into: Tensor | None = None) -> Tensor:
    """Adds to `into`, or to zeros. Reads the gradient, 32.0 KiB, once."""
    ids, order = ids.reshape(-1).sort(stable=True)
    grad_embed_full = grad_embed_full.contiguous()
    if into is None:
        into = torch.zeros((128, 64), dtype=torch.bfloat16, device=grad_embed_full.device)
    parts = torch.empty((8, 2, 64), dtype=torch.float32, device=grad_embed_full.device)
    _embedding_grad[(8, 1)](grad_embed_full, ids, order, tp_rank, into, parts, **CONFIGURATION)
    _embedding_grad_parts[(7, 1)](ids, tp_rank, into, parts, **CONFIGURATION)
    return into


def trial(device: torch.device) -> Callable[[], object]:
    """A launch in separate memory, to time candidates (runtime/train/tuning.py)."""
    given = (
        scratch((8, 32, 64), torch.bfloat16, device),
        scratch((8, 32), torch.int64, device, 128),
        0,
    )
    return lambda: embedding_grad(*given)
