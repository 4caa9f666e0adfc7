"""One step of gradient descent over flat memory, emitted by partc.

For each element it reads the gradient and the parameter once, and writes the parameter once: 12 bytes, and 2 more for
the 16-bit copy of a parameter; 639.4 KiB a step on the rank with the most parameters. Gradients are scaled by a factor
on the device, for the loss scale, accumulated batches, and clipping.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .scratch import scratch

CONFIGURATION = {"BLOCK": 1024, "num_warps": 4}  # or a faster candidate
INTERPRETED = {"BLOCK": 65536, "num_warps": 4}
CANDIDATES = (
    {"BLOCK": 1024, "num_warps": 4},
    {"BLOCK": 2048, "num_warps": 4},
    {"BLOCK": 2048, "num_warps": 8},
    {"BLOCK": 4096, "num_warps": 8},
)


@triton.jit
def _block(index, mask, grad_ptr, param_ptr, factor, decay, rate, WIDE: tl.constexpr):
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    grad = tl.load(grad_ptr + index, mask=mask).to(dtype) * factor
    param = tl.load(param_ptr + index, mask=mask).to(dtype)
    param -= rate * (grad + decay * param)
    tl.store(param_ptr + index, param, mask=mask)
    return param


@triton.jit
def _sgd(
    grad_ptr, param_ptr, factor_ptr, rates_ptr, first_ptr, starts_ptr, copy_ptr, shifts_ptr,
    count, MANY: tl.constexpr, COPIES: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    index = program * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr)
    row = 0
    alone = (program + 1) * BLOCK <= count
    if MANY:
        row = tl.load(first_ptr + program * (BLOCK // 1024))
        entry = tl.minimum((program + 1) * (BLOCK // 1024), tl.cdiv(count, 1024))
        last = tl.load(first_ptr + entry)
        alone = alone & (row == last)
    decay = tl.load(rates_ptr + row * 2 + 0)
    rate = tl.load(rates_ptr + row * 2 + 1)
    # Nearly all blocks are whole and have one row: they need no masks, and read 16 bytes at a time.
    if alone:
        param = _block(index, None, grad_ptr, param_ptr, factor, decay, rate, WIDE)
        if COPIES:
            shift = tl.load(shifts_ptr + row)
            if shift > -4611686018427387904:
                if EVEN:
                    shift = tl.multiple_of(shift, 8)
                tl.store(copy_ptr + shift + index, param)
    else:
        decays = tl.zeros([BLOCK], decay.dtype) + decay
        rates = tl.zeros([BLOCK], rate.dtype) + rate
        if COPIES:
            shifts = tl.zeros([BLOCK], tl.int64) + tl.load(shifts_ptr + row)
        if MANY:
            for later in range(row + 1, last + 1):
                here = index >= tl.load(starts_ptr + later)
                decays = tl.where(here, tl.load(rates_ptr + later * 2 + 0), decays)
                rates = tl.where(here, tl.load(rates_ptr + later * 2 + 1), rates)
                if COPIES:
                    shifts = tl.where(here, tl.load(shifts_ptr + later), shifts)
        inside = index < count
        param = _block(
            index, inside, grad_ptr, param_ptr, factor, decays, rates, WIDE
        )
        if COPIES:
            tl.store(copy_ptr + shifts + index, param, mask=inside & (shifts > -4611686018427387904))


def sgd(
    grad: Tensor,
    param: Tensor,
    factor: Tensor,
    rates: Tensor,
    first: Tensor | None = None,
    starts: Tensor | None = None,
    copy: Tensor | None = None,
    shifts: Tensor | None = None,
    even: bool = False,
) -> None:
    """Updates flat tensors of one size in place, except the gradient.

    Gradients are multiplied by `factor`. A row of `rates` holds the weight decay and the learning rate. Row i applies to the elements from
    `starts[i]` on; `first` holds the row of every 1024th element, and at its end the last row. The
    low-precision copies of a row's elements are `shifts[i]` further on in `copy`, or absent if that is -4611686018427387904.
    `even` says that all starts and shifts are multiples of 8.
    """
    how = CONFIGURATION if param.is_cuda else INTERPRETED
    _sgd[(triton.cdiv(param.numel(), how["BLOCK"]),)](
        grad, param, factor, rates,
        rates if first is None else first, rates if starts is None else starts,
        param if copy is None else copy, rates if shifts is None else shifts,
        param.numel(), MANY=first is not None, COPIES=copy is not None, EVEN=even, WIDE=param.dtype == torch.float64, **how,
    )


def trial(device: torch.device) -> Callable[[], object]:
    """A launch in separate memory, to time candidates (runtime/train/tuning.py)."""
    given = (
        scratch((16777216,), torch.float32, device),
        scratch((16777216,), torch.float32, device),
        torch.ones((), device=device),
        torch.ones((1, 2), device=device),
    )
    return lambda: sgd(*given)
