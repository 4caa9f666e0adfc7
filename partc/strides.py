"""Which values of a region lie in memory as their shape says, whatever its inputs do."""

from __future__ import annotations

from collections.abc import Iterable

from partc.program import MOVING, Graph, Op, Region
from partc.rules import kernels


def follows(region: Region) -> frozenset[str]:
    """By name: parameters, and what operations make so. Of an input nothing is known."""
    params = {value.name for value in region.params}
    found = _dense(region.forward, params)
    saved = found & set(region.saved)
    for graph in region.graphs[1:]:
        found |= _dense(graph, params | saved | (found & set(region.kept)))
    return frozenset(found)


def _dense(graph: Graph, given: Iterable[str]) -> set[str]:
    found = set(given)
    for op in graph.ops:
        if _keeps(op, found):
            found.update(value.name for value in op.results)
    return found


def _keeps(op: Op, dense: set[str]) -> bool:
    """Whether the operation's results are dense, given which of its operands are."""
    if op.name in kernels.CONTIGUOUS or not any(True for _ in op.refs()):
        return True
    if op.name not in MOVING | {"reshape", "alias", "cat"} and kernels.kind(op) != "pointwise":
        return False
    return all(name in dense for name in op.refs())
