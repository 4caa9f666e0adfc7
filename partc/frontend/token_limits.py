"""Upper bounds on integers in the batch: the rows of the tables, or the classes, that they index."""

from __future__ import annotations

from collections.abc import Mapping

from partc.ir.operations import KEEPING, spelling
from partc.ir.program import Op, Program, Ref

_SAME = KEEPING | spelling("slice")  # the result only has elements of the first operand
_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")


def token_limits(program: Program) -> dict[str, int]:
    """For each integer entry that indexes tables or classes: the smallest number of rows or classes."""
    types = program.value_types()
    found: dict[str, int] = {}
    for call in program.calls:
        region = program.region(call.region)
        entries = {
            value.name: name
            for value, name in zip(region.forward.inputs, call.args, strict=True)
            if name in program.inputs and types[name].dtype in ("i64", "i32", "i16", "u8")
        }
        shapes = {name: value.type.shape for name, value in region.forward.definitions().items()}
        shapes |= {value.name: value.type.shape for value in region.params}
        for op in region.forward.ops:
            first = op.args[0].name if op.args and isinstance(op.args[0], Ref) else ""
            if op.name in _SAME and first in entries and len(op.results) == 1:
                entries[op.results[0].name] = entries[first]
            for name, limit in _limits(op, entries, shapes):
                found[name] = min(limit, found.get(name, limit))
    return found


def _limits(op: Op, entries: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, int]]:
    """The entries that index the operation's first operand, with the number of its rows or classes."""
    table, index, *_ = (*op.args, None, None)
    if not isinstance(table, Ref) or not isinstance(index, Ref) or index.name not in entries:
        return []
    shape = shapes[table.name]
    if op.name == "embedding":
        return [(entries[index.name], shape[0])]
    return [(entries[index.name], shape[min(1, len(shape) - 1)])] if op.name in _LOSSES else []
