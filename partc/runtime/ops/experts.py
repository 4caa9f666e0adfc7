"""Products of rows with the matrices of the experts that they are routed to.

Shapes: x[s, i] rows, experts[s] the expert of each row, w[e, i, o] a matrix for each expert.

If the ranks of an axis hold different experts, rows travel: `route` plans it, `dispatch` sends rows to the ranks of
their experts, in the order of the experts, and `combine` returns them to their places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..comm.comm import Axis, Pending
from .accumulation import materialized
from .attention import row_dtype


def route(
    experts: Tensor, count: int, axis: Axis, *, stay: bool = False, most: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The plan for rows with one of `count` experts each, which the ranks of the axis hold in equal numbers.

    With `stay`, rows with the number `count` have no expert, and do not travel. The memory account assumes `most` times
    the mean number of received rows, unless `most` is 0; a layer that exceeds it is reported. Returns the order in
    which rows are sent, the order in which received rows are read, the index of each received row's expert among this
    rank's experts, and the numbers of rows, on the host: of sent rows by expert, of received rows by sender and expert.
    Raises UsageError P0552 for expert numbers out of range.
    """
    order = experts.argsort(stable=True)
    found = torch.bincount(experts, minlength=count)
    if found.numel() > count + stay:
        raise axis.loads.unknown(found.numel() - 1, count)
    leaving = found[:count]
    coming = axis.all_to_all(leaving.view(axis.size, -1), split_dim=0, concat_dim=0)
    counts = torch.stack((leaving, coming.flatten())).cpu()
    rows = int(counts[1].sum().item())
    if counts.is_meta:
        rows = math.ceil(rows * (most or 1))
    else:
        axis.loads.note_received(rows, len(order), most)
    # The first row of each sender and expert.
    places = (coming.flatten().cumsum(0) - coming.flatten()).view(axis.size, -1)
    each = coming.T.flatten()  # numbers of rows, by expert, then by sender
    shifts = places.T.flatten() - (each.cumsum(0) - each)
    grouped = shifts.repeat_interleave(each, output_size=rows) + torch.arange(rows, device=experts.device)
    own = torch.arange(coming.shape[1], device=experts.device)
    return order, grouped, own.repeat_interleave(coming.sum(0), output_size=rows), counts


def expert_order(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order in which rows are sorted by expert, the place of each row in it, and the expert of each sorted row.

    Rows of one expert stay in their order. Shapes: all [s]. `count` is the number of experts.
    """
    # A GPU's radix sort takes one pass for each byte of a key.
    keys = experts.to(torch.uint8) if experts.is_cuda and count <= 256 else experts
    found, order = keys.sort(stable=True)
    return order, _inverse(order), found.to(experts.dtype)


def dispatch(x: Tensor, order: Tensor, grouped: Tensor, counts: Tensor, axis: Axis) -> Tensor:
    """The rows received by this rank's experts."""
    return start_dispatch(x, order, grouped, counts, axis).wait()


def start_dispatch(x: Tensor, order: Tensor, grouped: Tensor, counts: Tensor, axis: Axis) -> Pending[Tensor]:
    leaving = x.index_select(0, order[: _sent_rows(order, counts)])
    coming = axis.start_exchange(leaving, *counts, rows=len(grouped))
    return coming.then(lambda rows: rows.index_select(0, grouped))


def combine(x: Tensor, order: Tensor, grouped: Tensor, counts: Tensor, axis: Axis) -> Tensor:
    """The rows that `dispatch` sent from this rank, back in their places; zero for rows that stayed."""
    return start_combine(x, order, grouped, counts, axis).wait()


def start_combine(x: Tensor, order: Tensor, grouped: Tensor, counts: Tensor, axis: Axis) -> Pending[Tensor]:
    leaving, coming = counts
    rows = _sent_rows(order, counts)
    going = axis.start_exchange(x.index_select(0, _inverse(grouped)), coming, leaving, rows=rows)
    if rows < len(order):
        return going.then(lambda back: x.new_zeros(len(order), *x.shape[1:]).index_copy_(0, order[:rows], back))
    return going.then(lambda back: back.index_select(0, _inverse(order)))


def _sent_rows(order: Tensor, counts: Tensor) -> int:
    """The number of rows that this rank sends: the first ones of `order`."""
    return len(order) if counts.is_meta else int(counts[0].sum())


def _inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation: reading rows by it is faster than writing rows by the permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def divide_rows(x: Tensor, counts: Tensor, shares: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Divide the rows received by `dispatch` among several tables, each of which is an expert on every rank.

    For tensors without memory, the mean: rows in proportion to the shares.
    """
    if counts.is_meta:
        sizes = [x.shape[0] * share // sum(shares) for share in shares]
    else:
        sizes = counts[1].view(-1, len(shares)).sum(0).tolist()
    parts: tuple[Tensor, ...] = x.split(sizes)
    return parts


def expert_matmul(x: Tensor, experts: Tensor, w: Tensor, *, ordered: bool = False) -> Tensor:
    """Each row times the matrix of its expert: [s, o]; zero for rows with a number beyond the experts.

    With `ordered`, rows are in the order of their experts, as `dispatch` leaves them, and each has an expert.
    """
    if ordered:
        return _products(x, _ends(experts, w.shape[0]), w)
    order = experts.argsort(stable=True)
    ends = _ends(experts[order], w.shape[0])
    made = _products(x.index_select(0, order), ends, w)
    if x.is_cuda:
        made.masked_fill_((torch.arange(len(order), device=x.device) >= ends[-1])[:, None], 0)
    return made.index_select(0, _inverse(order))


def _products(x: Tensor, ends: Tensor, w: Tensor) -> Tensor:
    """The products of rows in the order of their experts. Rows beyond the last end are zero, or on GPUs any numbers."""
    if x.is_cuda and fits_grouped_product(x, w):
        return torch.nn.functional.grouped_mm(x, w, offs=ends)
    out, end = x.new_empty(x.shape[0], w.shape[2]), 0
    for expert, rows in _rows(ends):
        torch.mm(x[rows], w[expert], out=out[rows])
        end = rows.stop
    out[end:].zero_()
    return out


def expert_matmul_grad_rows(grad: Tensor, experts: Tensor, w: Tensor, *, ordered: bool = False) -> Tensor:
    """The gradient of x, from the gradient of the product [s, o]."""
    return expert_matmul(grad, experts, w.mT, ordered=ordered)


def expert_matmul_grad_weight(grad: Tensor, experts: Tensor, x: Tensor, count: int, *, ordered: bool = False) -> Tensor:
    """The gradient of w for `count` experts; zero for experts without rows."""
    if not ordered:
        grad, experts, x = _in_order(grad, experts, x)
    ends = _ends(experts, count)
    if x.is_cuda and fits_grouped_product(x, grad):
        return torch.nn.functional.grouped_mm(x.mT, grad, offs=ends)
    into = x.new_zeros(count, x.shape[1], grad.shape[1])
    for expert, rows in _rows(ends):
        torch.mm(x[rows].mT, grad[rows], out=into[expert])
    return into


def expert_matmul_add_grad_weight(
    into: Tensor, grad: Tensor, experts: Tensor, x: Tensor, *, ordered: bool = False
) -> None:
    """The same, added to `into`."""
    if not ordered:
        grad, experts, x = _in_order(grad, experts, x)
    ends = _ends(experts, into.shape[0])
    if x.is_cuda and fits_grouped_product(x, grad):
        into.add_(torch.nn.functional.grouped_mm(x.mT, grad, offs=ends))
        return
    materialized(into)  # experts without rows add nothing
    for expert, rows in _rows(ends):
        if into.dtype == x.dtype:
            into[expert].addmm_(x[rows].mT, grad[rows])
        else:
            into[expert].add_(x[rows].mT @ grad[rows])


def _in_order(grad: Tensor, experts: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same rows in the order of their experts."""
    order = experts.argsort(stable=True)
    return grad.index_select(0, order), experts[order], x.index_select(0, order)


def expert_rows_grad(grad: Tensor, experts: Tensor, count: int) -> Tensor:
    """For each of `count` experts the sum of its rows, computed in at least fp32."""
    wide = row_dtype(grad)
    return grad.new_zeros(count, *grad.shape[1:], dtype=wide).index_add_(0, experts, grad.to(wide)).to(grad.dtype)


def expert_places(experts: Tensor) -> Tensor:
    """For each row of `experts` [scopes, rows], the number of rows before it in its scope with the same expert."""
    order = experts.argsort(dim=1, stable=True)
    ordered = experts.gather(1, order)
    places = torch.arange(experts.shape[1], device=experts.device) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(experts).scatter_(1, order, places)


def _ends(experts: Tensor, count: int) -> Tensor:
    """The end of each expert's rows, which are in the order of their experts.

    The result is stored on `experts`, because all products of a layer need it.
    """
    known, ends = getattr(experts, "ends", (0, None))
    if ends is None or known != count:
        every = torch.arange(count, device=experts.device, dtype=experts.dtype)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)
        experts.ends = count, ends  # type: ignore[attr-defined]
    return ends


def _rows(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert with rows, and these rows."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def fits_grouped_product(x: Tensor, y: Tensor) -> bool:
    """Whether torch's grouped product can compute all experts in one kernel, of rows x[s, i] and matrices y[e, i, o] or
    rows y[s, o]. It needs rows (or columns of matrices) that start at multiples of 16 bytes.
    """

    def even(each: Tensor) -> bool:
        inner, *outer = sorted(each.stride())
        along = each.dim() == 3 or each.stride(-1) == 1  # experts start at any row, but not at any column
        return along and inner == 1 and all(step % 8 == 0 for step in outer) and each.data_ptr() % 16 == 0

    there = x.dtype == torch.bfloat16 and x.shape[0] > 0 and hasattr(torch.nn.functional, "grouped_mm")
    return there and even(x) and even(y) and min(y.shape[1:]) > 1
