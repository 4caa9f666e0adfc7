"""Values with a first dimension of data-dependent length: rows at the ranks of their experts."""

from __future__ import annotations

from collections.abc import Iterable

from partc.ir.collectives import ROUTED
from partc.ir.program import Op, Region

_SUMS = frozenset({"expert_matmul_grad_weight", "expert_rows_grad"})


def ragged_rows(region: Region) -> frozenset[str]:
    """The names of a region's values whose first dimension depends on the data."""
    known: set[str] = set()
    if any(op.name in ROUTED for graph in region.graphs for op in graph.ops):
        for graph in region.graphs:
            known = _ragged_values(graph.ops, known)
    return frozenset(known)


def _ragged_values(ops: Iterable[Op], given: Iterable[str]) -> set[str]:
    found = set(given)
    for op in ops:
        if op.name == "route":
            again = not found.isdisjoint(op.refs())  # rows that travel over a second axis
            found.update(value.name for value in op.results[0 if again else 1 : 3])
        elif op.name == "dispatch" or (op.name == "combine" and [*op.refs()][1] in found):
            found.add(op.result.name)
        elif op.name not in _SUMS | {"combine"} and not found.isdisjoint(op.refs()) and not _summed(op):
            found.update(value.name for value in op.results)
    return found


def _summed(op: Op) -> bool:
    """Whether the operation adds all rows up."""
    return op.name == "sum" and (len(op.args) < 2 or op.args[1] in (0, ()) or 0 in _dims(op))


def _dims(op: Op) -> tuple[object, ...]:
    dims = op.args[1]
    return dims if isinstance(dims, tuple) else (dims,)
