"""Embedding tables: gradients of whole tables, and tables whose rows are distributed over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .accumulation import in_rows
from .attention import row_dtype
from .row_gradients import TouchedRows


def embedding_shard(weight: Tensor, ids: Tensor, rank: int) -> Tensor:
    """Lookup in a vocabulary-sharded table: weight[n, d] holds the ids from rank·n on; zero for other ids.

    ids[*rows] -> [*rows, d]. The sum over the ranks that hold the table is the embedding.
    """
    local, outside = _local_ids(ids, weight.shape[0], rank)
    return torch.embedding(weight, local).masked_fill_(outside.unsqueeze(-1), 0)


def embedding_shard_add_grad(into: Tensor, grad: Tensor, ids: Tensor, rank: int, padding_idx: int = -1) -> None:
    """Add the table's gradient, from that of `embedding_shard`, to `into`[n, d]."""
    local, outside = _local_ids(ids, into.shape[0], rank)
    if padding_idx >= 0:
        outside = outside | (ids == padding_idx)
    rows = in_rows(grad.masked_fill(outside.unsqueeze(-1), 0))
    into.index_add_(0, local.reshape(-1), rows.to(into.dtype))


def embedding_shard_grad(grad: Tensor, ids: Tensor, rows: int, rank: int, padding_idx: int = -1) -> Tensor:
    """The table's gradient [rows, d] as a new tensor, summed in at least fp32."""
    into = grad.new_zeros(rows, grad.shape[-1], dtype=row_dtype(grad))
    embedding_shard_add_grad(into, grad, ids, rank, padding_idx)
    return into


def embedding_add_grad(into: Tensor, grad: Tensor, ids: Tensor, padding_idx: int = -1) -> None:
    """Add the gradient of a whole table, from that of `F.embedding(ids, table)`, to `into`[n, d]."""
    if padding_idx >= 0:
        grad = grad.masked_fill((ids == padding_idx).unsqueeze(-1), 0)
    into.index_add_(0, ids.reshape(-1), in_rows(grad).to(into.dtype))


def embedding_grad(grad: Tensor, ids: Tensor, rows: int, padding_idx: int = -1) -> Tensor:
    """The gradient [rows, d] of a whole table as a new tensor, summed in at least fp32."""
    into = grad.new_zeros(rows, grad.shape[-1], dtype=row_dtype(grad))
    embedding_add_grad(into, grad, ids, padding_idx)
    return into


def embedding_rows(grad: Tensor, ids: Tensor, padding_idx: int = -1) -> TouchedRows:
    """The gradients of the rows that `F.embedding(ids, table)` read."""
    numbers, rows = ids.reshape(-1), in_rows(grad)
    if padding_idx >= 0 and not ids.is_meta:
        kept = numbers != padding_idx
        numbers, rows = numbers[kept], rows[kept]
    return TouchedRows(numbers, rows)


def embedding_shard_rows(
    grad: Tensor, ids: Tensor, rows: int, rank: int, ranks: int, padding_idx: int = -1
) -> TouchedRows:
    """The gradients of this rank's rows that `embedding_shard` read; `rows` of a table are on each of `ranks`.

    For tensors without memory, ids count as spread evenly.
    """
    numbers, values = ids.reshape(-1), in_rows(grad)
    if ids.is_meta:
        even = -(-len(numbers) // ranks)
        return TouchedRows(numbers[:even].clone(), values[:even].clone())
    local = numbers - rank * rows
    kept = (local >= 0) & (local < rows)
    if padding_idx >= 0:
        kept &= numbers != padding_idx
    return TouchedRows(local[kept], values[kept])


def _local_ids(ids: Tensor, rows: int, rank: int) -> tuple[Tensor, Tensor]:
    """Ids relative to this rank's first row (0 for ids of other ranks), and the mask of this rank's ids."""
    local = ids - rank * rows
    outside = (local < 0) | (local >= rows)
    return local.masked_fill_(outside, 0), outside
