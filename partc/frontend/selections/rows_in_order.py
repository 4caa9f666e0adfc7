"""Rows that a mask selects, by their order: the first and last ones, the largest, and several selections in a row.

x[mask][0]                        the first of the packed rows: selected rows in front, rows of nan behind them
x[mask][-1]                       the row at place mask.sum() - 1 of the packed rows
x[mask][:8]                       eight packed rows, of which arange(8) < mask.sum() selects
x[mask].sort(0)                   all rows with infinity in the others; the first mask.sum() are selected
torch.cat([x[mask], y[other]])    all rows of both, which both masks select
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partc.frontend.selections.selected_rows import INTEGERS, MaskedRows, SelectedRows
from partc.frontend.torch_call import TorchCall

ORDERED = frozenset({"sort", "topk", "median", "flip"})


def read(rows: SelectedRows, x: Tensor, index: Any) -> Any:
    """x[index] if the index counts selected rows; NotImplemented for other tensors and indices.

    A place beyond the rows, which is an error in eager code, reads nan. Rows of integers have no such number.
    """
    held = rows.of(x)
    first, *rest = index if isinstance(index, tuple) else (index,)
    if held is None or held.dim or not x.is_floating_point() or rows.value(held.mask) is not None:
        return NotImplemented
    if not all(item is None or isinstance(item, int | slice) for item in rest) or isinstance(first, bool):
        return NotImplemented
    count, most = held.count(), len(x)
    if isinstance(first, int) and -most <= first < most:
        place = torch.tensor(first) if first >= 0 else torch.where(count + first < 0, most - 1, count + first)
        return _packed(rows, x).index_select(0, place.reshape(1))[(0, *rest)]
    if isinstance(first, Tensor) and first.dtype in INTEGERS and first.dim() < 2 and rows.of(first) is None:
        places = torch.where(first < 0, first + count, first).reshape(-1)
        found = _packed(rows, x).index_select(0, places)
        return found[(slice(None), *rest)] if first.dim() else found[0][tuple(rest)]
    if isinstance(first, slice) and first != slice(None) and first.step in (None, 1):
        match first.start or 0, first.stop:
            case int(start), int() | None as stop if start >= 0:
                part = _packed(rows, x)[start : most if stop is None else stop]
                left_out = start - stop if stop is not None and stop < 0 else start
                some = torch.arange(len(part)) < count - left_out
                return rows.selected(part[(slice(None), *rest)], some)
            case int(start), None if -most <= start < 0:
                places = count + start + torch.arange(-start)
                part, some = _packed(rows, x).index_select(0, places.clamp(min=0)), places >= 0
                return rows.selected(part[(slice(None), *rest)], some)
    return NotImplemented


def joined(rows: SelectedRows, parts: Sequence[Any], dim: int) -> Any:
    """The concatenation of selected rows, also with plain ones; NotImplemented along other dimensions."""
    held = [rows.of(x) for x in parts]
    if not any(held) or any(each is not None and each.dim for each in held) or dim % parts[0].dim():
        return NotImplemented
    masks = [
        torch.ones(len(x), dtype=torch.bool) if each is None else each.chosen.flatten()
        for x, each in zip(parts, held, strict=True)
    ]
    whole = [x if each is None else each.only(x) for x, each in zip(parts, held, strict=True)]
    return rows.selected(torch.cat(whole), torch.cat(masks))


def ordered(rows: SelectedRows, call: TorchCall, held: MaskedRows) -> Any:
    """sort, topk, median or flip of selected rows; NotImplemented along other dimensions."""
    x, name = call.given, call.name
    if held.dim or not x.is_floating_point():
        return NotImplemented
    if name == "flip":
        dims = call.argument(1, "dims")
        dims = (call.args[1:] or (dims,)) if isinstance(dims, int) else dims
        if not any(dim % x.dim() == 0 for dim in dims):
            return NotImplemented
        return rows.selected(call.run_on(held.only(x)), held.chosen.flatten().flip(0))
    dim = call.argument(2 if name == "topk" else 1, "dim", None if name == "median" else -1)
    if name == "median" and dim is None:
        values = held.only(x, math.inf).flatten().sort().values
        return values.index_select(0, _middle(held, x[0].numel()))[0]
    if not isinstance(dim, int) or dim % x.dim():
        return NotImplemented
    if name == "median":
        values, places = held.only(x, math.inf).sort(0)
        middle = _middle(held, 1)
        values, places = values.index_select(0, middle), held.numbers(places).index_select(0, middle)
        kept = call.argument(2, "keepdim", False)
        return torch.return_types.median((values, places) if kept else (values[0], places[0]))
    downwards = call.argument(3, "largest", True) if name == "topk" else call.argument(2, "descending", False)
    made = call.run_on(held.only(x, -math.inf if downwards else math.inf))
    values, places = made[0], held.numbers(made[1])
    if name == "sort":
        some = torch.arange(len(x)) < held.count()
        values, places = rows.selected(values, some), rows.selected(places, some)
    return type(made)((values, places))


def _packed(rows: SelectedRows, x: Tensor) -> Tensor:
    packed = rows.packed(x)
    assert packed is not None
    return packed


def _middle(held: MaskedRows, times: int) -> Tensor:
    """The place of the lower median of `times` sorted numbers for each selected row."""
    return ((held.count() * times - 1) // 2).clamp(min=0).reshape(1)
