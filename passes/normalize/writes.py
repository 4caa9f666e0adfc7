"""Slices that are written into a tensor, as joins.

    y_1 = slice_scatter(y, a, 1, 0, 1, 1)         rest = slice(y, 1, 2, 8, 1)
    y_2 = slice_scatter(y_1, b, 1, 1, 2, 1)   ->  y_2  = cat((a, b, rest), 1)

One join replaces a chain of writes to different slices if nothing reads the tensor in between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from partc.ir.naming import unique
from partc.ir.program import Arg, Graph, Op, Ref, Value
from partc.rules.rule import integers


class _WriteChain:
    """Writes to different elements along one dimension. Their bounds are in order."""

    def __init__(self, op: Op) -> None:
        self.ops: list[Op] = []
        self._dim = (_bounds(op) or (0, 0, 0))[0]
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self.add(op)

    def add(self, op: Op) -> bool:
        """Add a write, unless it is along another dimension, or to elements that an earlier one replaces."""
        dim, first, last = _bounds(op) or (0, 0, 0)
        place = bisect_right(self._lasts, first)  # of the first write that ends behind the start of this one
        if dim != self._dim or (place < len(self._firsts) and self._firsts[place] < last):
            return False
        self._firsts.insert(place, first)
        self._lasts.insert(place, last)
        self.ops.append(op)
        return True


def with_joins(graph: Graph) -> Graph:
    """The graph without writes of consecutive elements."""
    writes = {op.result.name: op for op in graph.ops if _bounds(op) is not None}
    if not writes:
        return graph
    reads = Counter(name for op in graph.ops for name in op.refs()) + Counter(graph.outputs)
    chains: dict[str, _WriteChain] = {}  # result -> the chain of writes that leads to it from an unwritten tensor
    continued: set[str] = set()
    for name, op in writes.items():
        read = next(op.refs())
        if read in chains and reads[read] == 1 and chains[read].add(op):
            continued.add(read)
            chains[name] = chains.pop(read)
        else:
            chains[name] = _WriteChain(op)
    taken = {*graph.definitions()}
    ops: list[Op] = []
    for op in graph.ops:
        if not op.results or op.results[0].name not in writes:
            ops.append(op)
        elif op.result.name not in continued:
            ops.extend(_joined(tuple(chains[op.result.name].ops), taken))
    return replace(graph, ops=tuple(ops))


def _bounds(op: Op) -> tuple[int, int, int] | None:
    """The dimension, start and end of the elements that a write replaces; None for other operations."""
    if op.name != "slice_scatter" or len(op.args) != 6 or op.args[5] != 1:
        return None
    dim, first, last, _ = integers(op.args[2:])
    return dim, first, last


def _joined(chain: tuple[Op, ...], taken: set[str]) -> Iterator[Op]:
    whole, last = chain[0].args[0], chain[-1]
    dim = integers(last.args[2])[0]
    shape = last.result.type.shape
    written = sorted(((_bounds(op) or (0, 0, 0))[1:], op.args[1]) for op in chain)
    parts: list[Arg] = []
    done = 0
    for (first, end), part in (*written, ((shape[dim], shape[dim]), None)):
        if first > done:
            kept = (*shape[:dim], first - done, *shape[dim + 1 :])
            type = last.result.type.shaped(kept)
            value = Value(name=unique(f"{last.result.name}_kept", taken), type=type)
            yield Op(name="slice", args=(whole, dim, done, first, 1), results=(value,), source=last.source)
            parts.append(Ref(value.name))
        if part is not None:
            parts.append(part)
        done = end
    yield replace(last, name="cat", args=(tuple(parts), dim), attrs=())
