"""Loops over time, which apply a step function from states to states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Step = Callable[..., tuple[Tensor, ...]]


def scan(
    step: Step,
    starts: Sequence[Tensor],
    sequences: Sequence[Tensor],
    constants: Sequence[Tensor],
    *,
    length: int,
    dims: Sequence[int],
    reverse: bool = False,
) -> tuple[Tensor, ...]:
    """The states after the last step, then a sequence for each further result of a step.

    `step` takes states, one element of each sequence, and the constants. `dims` are the time dimensions of operand
    sequences, then of result sequences.
    """
    times = range(length)[::-1] if reverse else range(length)
    return steps(step, starts, sequences, constants, times=times, length=length, dims=dims)


def steps(
    step: Step,
    starts: Sequence[Tensor],
    sequences: Sequence[Tensor],
    constants: Sequence[Tensor],
    *,
    times: Iterable[int],
    length: int,
    dims: Sequence[int],
) -> tuple[Tensor, ...]:
    """The results of a scan that runs the steps at these times only."""
    states: Sequence[Tensor] = starts
    made: list[Tensor] = []
    into = dims[len(sequences) :]
    for t in times:
        elements = [x.select(dim, t) for x, dim in zip(sequences, dims, strict=False)]
        found = step(*states, *elements, *constants)
        states, rows = found[: len(starts)], found[len(starts) :]
        if not made:
            made = [_room(row, dim, length) for row, dim in zip(rows, into, strict=True)]
        for x, row, dim in zip(made, rows, into, strict=True):
            x.select(dim, t).copy_(row)
    return (*states, *made)


def _room(row: Tensor, dim: int, length: int) -> Tensor:
    """Memory for a sequence of elements like this one."""
    return torch.empty((*row.shape[:dim], length, *row.shape[dim:]), dtype=row.dtype, device=row.device)
