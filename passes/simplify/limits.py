"""Attention masks as limits: a few integers for each row, and at most one for each column.

    y = attention(q, k, v, or(le(j, i), lt(j, 4)), False, None)
  ->
    changes = cat((full((4,), 4), add(arange(8), 5)))                  # where reading ends, of 12 rows
    limits  = cat((zeros, reshape(changes, (1, 12, 1))), 2)
    y       = attention(q, k, v, None, False, None, limits=limits, reads=(27, 57, 144))

A position is read if an odd number of the row's limits are at most its key. Keys are position numbers by default; for
documents the keys are document numbers, and the limits enclose the number of the row's document. `reads` has the
numbers of scores that the first and second half of a constant mask's rows read, and of all scores of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from partc.errors import Source
from partc.ir.naming import unique
from partc.ir.program import Arg, DType, DTypeArg, Op, Ref, TensorType, Value
from partc.passes.simplify.matrices import Runs

_MOST_LIMITS = 8  # limits of a row
_MOST_PIECES = 64  # linear pieces of a limit as a function of the row


@dataclass(slots=True)
class LimitWriter:
    """Collects new operations; `taken` has the names in use."""

    taken: set[str]
    source: Source | None
    ops: list[Op] = field(default_factory=list)

    def add(self, name: str, shape: Sequence[int], *args: Arg, dtype: DType = "i64", filled: bool = False) -> Ref:
        value = Value(
            name=unique(f"limits_{name}", self.taken),
            type=TensorType.replicated(dtype, tuple(shape)),
        )
        attrs = (("dtype", DTypeArg(dtype)),) if filled else ()
        self.ops.append(Op(name=name, args=args, attrs=attrs, results=(value,), source=self.source))
        return Ref(value.name)


Attrs = tuple[tuple[str, Arg], ...]


def limits_of(runs: Runs, writing: LimitWriter) -> Attrs | None:
    """The limits of a constant mask, and how many scores its rows read; None if it needs too many limits."""
    ends = _closed(runs)
    limits = _constant(ends, writing)
    if limits is None:
        return None
    counts = (ends[:, 1::2] - ends[:, ::2]).sum(1)
    half = runs.rows // 2
    reads = int(counts[:half].sum()), int(counts[half:].sum()), runs.rows * runs.columns
    return ("limits", limits), ("reads", reads)


def limits_or_keys(runs: Runs, row: Value, writing: LimitWriter) -> Attrs | None:
    """Limits and keys of a constant mask, or'ed with a row of booleans [b, 1, 1, t]: visible columns have the key
    -1.
    """
    read = torch.tensor([[-1, 0]]).expand(runs.rows, 2)
    limits = _constant(torch.cat((read, _closed(runs)), 1), writing)
    if limits is None:
        return None
    b, t = row.type.shape[0], row.type.shape[-1]
    shown = writing.add("reshape", (b, t), Ref(row.name), (b, t), dtype="bool")
    at = writing.add("expand", (b, t), writing.add("arange", (t,), t), (b, t))
    keys = writing.add("masked_fill", (b, t), at, shown, -1)
    return ("limits", limits), ("keys", keys)


def limits_of_documents(row: Value, column: Value, writing: LimitWriter) -> Attrs:
    """Limits and keys of a mask in which a row reads positions with its own number: [b, 1, s, 1] == [b, 1, 1, t]."""

    dtype: DType = "i64" if row.type.dtype == "bool" else row.type.dtype

    def numbers(value: Value, *last: int) -> Ref:
        shape, made = (value.type.shape[0], max(value.type.shape[-2:]), *last), Ref(value.name)
        if value.type.dtype == "bool":
            made = writing.add("to", value.type.shape, made, DTypeArg(dtype))
        return writing.add("reshape", shape, made, shape, dtype=dtype)

    own = numbers(row, 1)
    b, s = row.type.shape[0], row.type.shape[-2]
    after = writing.add("add", (b, s, 1), own, 1, dtype=dtype)
    limits = writing.add("cat", (b, s, 2), (own, after), 2, dtype=dtype)
    return ("limits", limits), ("keys", numbers(column))


def equal_numbers(op: Op, types: Mapping[str, TensorType]) -> tuple[Value, Value] | None:
    """The values [b, 1, s, 1] and [b, 1, 1, t] that a mask compares for equality; None for other masks."""
    if op.name != "eq" or op.attrs or not all(isinstance(arg, Ref) and arg.name in types for arg in op.args):
        return None
    values = [Value(name=name, type=types[name]) for name in op.refs()]
    for row, column in (values, values[::-1]):
        fits = all(
            len(each.type.shape) > 2
            and set(each.type.shape[1:-2]) <= {1}
            and each.type.dtype in ("i64", "i32", "bool")
            and each.type.dtype == row.type.dtype
            for each in (row, column)
        )
        s, one, single, t = (*row.type.shape[-2:], *column.type.shape[-2:]) if fits else (0, 0, 0, 0)
        if one == single == 1 and s > 1 and t > 1:
            return row, column
    return None


def _closed(runs: Runs) -> Tensor:
    """The changes of each row, the last of which ends reading, so that positions added later are not read."""
    return torch.cat((runs.changes, torch.full((runs.rows, runs.changes.shape[1] % 2), runs.columns)), 1)


def _constant(changes: Tensor, writing: LimitWriter) -> Ref | None:
    """Limits [1, s, n] as operations."""
    s, n = changes.shape
    pieces = [[*islice(_pieces(changes[:, place]), _MOST_PIECES + 1)] for place in range(n)]
    if not 0 < n <= _MOST_LIMITS or any(len(each) > _MOST_PIECES for each in pieces):
        return None
    columns = []
    for each in pieces:
        parts = [_line(first, step, length, writing) for first, step, length in each]
        whole = parts[0] if len(parts) == 1 else writing.add("cat", (s,), tuple(parts), 0)
        columns.append(writing.add("reshape", (1, s, 1), whole, (1, s, 1)))
    return columns[0] if n == 1 else writing.add("cat", (1, s, n), tuple(columns), 2)


def _line(first: int, step: int, length: int, writing: LimitWriter) -> Ref:
    """first, first + step, …"""
    if not step:
        return writing.add("full", (length,), (length,), first, filled=True)
    made = writing.add("arange", (length,), length)
    made = made if step == 1 else writing.add("mul", (length,), made, step)
    return writing.add("add", (length,), made, first) if first else made


def _pieces(x: Tensor) -> Iterator[tuple[int, int, int]]:
    """A vector as arithmetic progressions: (first number, step, length) of each."""
    steps = x.diff()
    bends = torch.nonzero(steps[1:] != steps[:-1]).flatten() + 1
    start, last = 0, len(x) - 1
    while start <= last:
        after = int(torch.searchsorted(bends, start, right=True))
        end = start if start == last else int(bends[after]) if after < len(bends) else last
        yield int(x[start]), int(steps[start]) if end > start else 0, end - start + 1
        start = end + 1
