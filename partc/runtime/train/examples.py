"""Datasets of examples as data: tables of Hugging Face's `datasets`, whose columns are the entries of the batch.

A table with a length is read by rows: batch n has the rows n * B to n * B + B of an epoch, in the table's order, and a
rank reads only its own rows. A table that can only be iterated is batched by its own `batch`. Nothing here imports
`datasets`: objects are recognised by their attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..layout import Shard, local_part
from .entries import check_indices, rebuilt_batch


def is_table(data: Any) -> bool:
    """Whether data is a table with named columns and a known number of examples."""
    return hasattr(data, "column_names") and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def is_stream(data: Any) -> bool:
    """Whether data is a stream of examples with named columns."""
    return hasattr(data, "column_names") and callable(getattr(data, "batch", None)) and not hasattr(data, "__len__")


class ExampleRows:
    """Batches of a table's rows; `form` is a batch with the constants.

    Raises UsageError P0530 (the table fails), P0543 (it does not fit the batch) and P0544 (it ends).
    """

    def __init__(self, table: Any, plan: Mapping[str, Any], form: Any, *, name: str, again: bool) -> None:
        self._shards = {entry: Shard(kind["dtype"] + kind["layout"]) for entry, kind in plan["inputs"].items()}
        self._limits = {entry: kind.get("indices", ()) for entry, kind in plan["inputs"].items()}
        self._form, self._name, self._again = form, name, again
        self.rows = batch_rows(self._shards)
        read = next((entry for entry, kind in plan["inputs"].items() if "largest" in kind), None)
        if read is not None:
            cause = f"the model reads the largest number of {read!r} in Python, and ranks only read their rows"
            raise UsageError("P0543", cause, "write data(step), which makes whole batches", alike=True)
        known = table.column_names
        absent = [entry for entry in self._shards if entry not in known]
        if absent:
            cause = f"{name} of the model file has the columns {', '.join(map(str, known))}, and none {absent[0]!r}"
            raise UsageError("P0543", cause, "name columns like the entries of batch(): rename_column", alike=True)
        select = getattr(table, "select_columns", None)
        self._table = select(list(self._shards)) if callable(select) else table
        self.count = len(table) // self.rows  # batches per epoch
        if not self.count:
            cause = f"{name} of the model file has {len(table):,} rows, and a batch {self.rows:,}"
            raise UsageError("P0544", cause, "give a longer one, or compile for a smaller batch", alike=True)

    def batch(self, number: int) -> Any:
        return rebuilt_batch(self._form, self._read(number, self._shards, range(self.rows)))

    def part(
        self, number: int, inputs: Mapping[str, Shard], sizes: Mapping[str, int], coordinate: Mapping[str, int]
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        own: dict[tuple[int, ...], list[str]] = {}
        for name, shard in inputs.items():
            rows = local_part(torch.arange(self.rows), shard.dims[:1], sizes, coordinate)
            own.setdefault(tuple(rows.tolist()), []).append(name)
        for mine, names in own.items():
            for name, x in self._read(number, names, mine).items():
                dims = (((len(mine), ()),), *inputs[name].dims[1:])
                found[name] = local_part(x, dims, sizes, coordinate).contiguous()
        return found

    def position(self, number: int) -> str:
        return ""

    def _read(self, number: int, names: Sequence[str] | Mapping[str, Shard], rows: Sequence[int]) -> dict[str, Tensor]:
        epoch, index = divmod(number, self.count)
        if epoch and not self._again:
            raise UsageError(
                "P0544",
                f"{self._name} of the model file ends after {self.count:,} batch{'es' * (self.count != 1)}",
                "--data-end repeat starts it again; --steps and --accumulate count batches",
                alike=True,
            )
        try:
            columns = self._table[[index * self.rows + row for row in rows]]
        except Exception as error:
            cause = f"{self._name} of the model file fails at batch {number}: {type(error).__name__}: {error}"
            raise UsageError("P0530", cause, "what it reads must be where each rank runs") from error
        found = {name: as_entry(columns[name], name, self._shards[name], len(rows)) for name in names}
        for name, x in found.items():
            check_indices(x, self._limits[name], f"the column {name!r}", alike=False)
        return found


def batch_rows(shards: Mapping[str, Shard]) -> int:
    """The number of examples in a batch. Raises UsageError P0543 if it differs between entries."""
    lengths = {shard.shape[:1] for shard in shards.values()}
    if len(lengths) != 1 or () in lengths:
        cause = "a dataset fills entries with one row for each example, and the entries of batch() are not all such"
        raise UsageError("P0543", cause, "write data(step), which makes whole batches", alike=True)
    return lengths.pop()[0]


def as_entry(column: Any, name: str, shard: Shard, rows: int) -> Tensor:
    """A column of some examples as a tensor of the entry's type. Raises UsageError P0543."""
    shape = (rows, *shard.shape[1:])
    try:
        if isinstance(column, Tensor):
            found = column
        elif isinstance(column, list | tuple) and column and isinstance(column[0], Tensor):
            found = torch.stack(list(column))
        else:
            found = torch.as_tensor(column)
    except (ValueError, TypeError, RuntimeError) as error:
        help = "give all examples one length (padding, group_texts), and numbers only"
        raise UsageError("P0543", f"the column {name!r} is not a tensor: {error}", help, alike=True) from None
    if tuple(found.shape) != shape:
        help = "every batch has the sizes of batch()"
        cause = f"the column {name!r} of {rows} examples has shape {list(found.shape)}, of batch() {list(shape)}"
        raise UsageError("P0543", cause, help, alike=True)
    return found.to(shard.dtype)
