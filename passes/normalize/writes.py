"""Slices that are written into a tensor, as joins.

    y_1 = slice_scatter(y, a, 1, 0, 1, 1)         rest = slice(y, 1, 2, 8, 1)
    y_2 = slice_scatter(y_1, b, 1, 1, 2, 1)   ->  y_2  = cat((a, b, rest), 1)

One join replaces a chain of writes to different slices if nothing reads the tensor in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from partc.ir.naming import unique
from partc.ir.program import Arg, Graph, Op, Ref, Value
from partc.rules.rule import integers


def with_joins(graph: Graph) -> Graph:
    """The graph without writes of consecutive elements."""
    writes = {op.result.name: op for op in graph.ops if _bounds(op) is not None}
    if not writes:
        return graph
    reads = Counter(name for op in graph.ops for name in op.refs()) + Counter(graph.outputs)
    chains: dict[str, tuple[Op, ...]] = {}  # result -> the chain of writes that leads to it from an unwritten tensor
    continued: set[str] = set()
    for name, op in writes.items():
        before = chains.get(next(op.refs()), ())
        extends = bool(before) and reads[before[-1].result.name] == 1 and not any(_overlap(op, each) for each in before)
        chains[name] = (*before, op) if extends else (op,)
        if extends:
            continued.add(before[-1].result.name)
            del chains[before[-1].result.name]
    taken = {*graph.definitions()}
    ops: list[Op] = []
    for op in graph.ops:
        if not op.results or op.results[0].name not in writes:
            ops.append(op)
        elif op.result.name not in continued:
            ops.extend(_joined(chains[op.result.name], taken))
    return replace(graph, ops=tuple(ops))


def _bounds(op: Op) -> tuple[int, int, int] | None:
    """The dimension, start and end of the elements that a write replaces; None for other operations."""
    if op.name != "slice_scatter" or len(op.args) != 6 or op.args[5] != 1:
        return None
    dim, first, last, _ = integers(op.args[2:])
    return dim, first, last


def _overlap(a: Op, b: Op) -> bool:
    """Whether the writes are along different dimensions, or to common elements."""
    one, other = _bounds(a), _bounds(b)
    assert one is not None and other is not None
    return one[0] != other[0] or (one[1] < other[2] and other[1] < one[2])


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
