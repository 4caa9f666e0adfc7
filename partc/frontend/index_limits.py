"""The limits of indices in the batch: the rows of the tables, or the classes, that integer entries select."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from partc.ir.index_limit import IndexLimit
from partc.ir.operations import KEEPING, SHOWING
from partc.ir.program import Op, Program, Ref, TensorType
from partc.rules.rule import argument, integers
from partc.rules.shapes import dim_index, slice_bounds

_Types = Mapping[str, TensorType]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """An entry of the batch, or a part of it, as in `IndexLimit`."""

    entry: str
    part: tuple[tuple[int, int, int], ...] | None = ()
    viewed: bool = False  # whether its dimensions may no longer be those of the entry

    def after(self, op: Op, types: _Types) -> _Read | None:
        """The result of an operation on this read; None if it has other elements."""
        shape = types[next(op.refs())].shape
        if op.name in KEEPING:
            return replace(self, viewed=self.viewed or op.name in SHOWING or op.result.type.shape != shape)
        if op.name == "select":
            dim, at = (integers(argument(op, place, name))[0] for place, name in ((1, "dim"), (2, "index")))
            dim = dim_index(dim, len(shape))
            start, step = at % shape[dim], 1
            stop = start + 1
        elif op.name == "slice":
            dim, start, stop, step = slice_bounds(op, shape)
        else:
            return None
        # Microbatches may be batches of their own, so that their examples are not those of the batch.
        if self.part is None or self.viewed or step != 1 or dim == 0:
            return replace(self, part=None)
        return replace(self, part=(*self.part, (dim, start, stop)), viewed=op.name == "select")


def index_limits(program: Program) -> dict[str, tuple[IndexLimit, ...]]:
    """The limits of each integer entry that selects rows or classes."""
    types = program.value_types()
    found: dict[str, dict[IndexLimit, None]] = {}
    for call in program.calls:
        region = program.region(call.region)
        reads = {
            value.name: _Read(entry=name)
            for value, name in zip(region.forward.inputs, call.args, strict=True)
            if name in program.inputs and types[name].dtype in ("i64", "i32", "i16", "u8")
        }
        own = region.types(region.forward)
        for op in region.forward.ops:
            first = next(op.refs(), "")
            if first in reads and len(op.results) == 1 and (read := reads[first].after(op, own)):
                reads[op.result.name] = read
            for index, limit in _limits(op, own):
                if index in reads:
                    read = reads[index]
                    found.setdefault(read.entry, {})[replace(limit, part=read.part)] = None
    return {name: tuple(limits) for name, limits in found.items()}


def _limits(op: Op, types: _Types) -> Iterator[tuple[str, IndexLimit]]:
    """The values by which an operation selects rows or classes, with the number of these."""
    table, second, third, *_ = (*op.args, None, None, None)
    if not isinstance(table, Ref):
        return
    shape = types[table.name].shape or (1,)  # torch takes a number for one element
    if op.name in ("embedding", "embedding_bag") and isinstance(second, Ref):
        yield second.name, IndexLimit(below=shape[0])
    elif op.name in ("gather", "index_select") and isinstance(third, Ref) and isinstance(second, int):
        yield third.name, IndexLimit(below=shape[dim_index(second, len(shape))])
    elif op.name == "index" and isinstance(second, tuple):
        indices = [index.name if isinstance(index, Ref) else "" for index in second]
        if not any(name and types[name].dtype == "bool" for name in indices):  # masks take several dimensions
            yield from ((name, IndexLimit(below=n, least=-n)) for name, n in zip(indices, shape, strict=False) if name)
    elif op.name == "one_hot" and isinstance(second, int) and second > 0:
        yield table.name, IndexLimit(below=second)
    elif op.name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd") and isinstance(second, Ref):
        ignored = argument(op, 4, "ignore_index", -100)
        yield second.name, IndexLimit(below=shape[min(1, len(shape) - 1)], ignored=integers(ignored)[0])
