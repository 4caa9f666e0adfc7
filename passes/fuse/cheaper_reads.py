"""Values that a later kernel makes again from smaller ones, instead of reading them from memory.

    x_wide = to(x, <f32>)                       x_wide   = to(x, <f32>)
    total  = sum(x_wide, (2,), True)            total    = sum(x_wide, (2,), True)
    whole  = all_reduce(total)            ->    whole    = all_reduce(total)
    unit   = mul(x_wide, whole)                 x_wide_2 = to(x, <f32>)
                                                unit     = mul(x_wide_2, whole)

A kernel cannot hold both the operations before a collective or a matrix product, and those after it. A value that is
read on both sides would be written by one kernel and read by the other. The second makes it again by elementwise
operations, if it reads no more bytes for this than the value has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from partc import fuel
from partc.ir.layout import Sizes
from partc.ir.naming import unique
from partc.ir.operations import RANDOM
from partc.ir.program import Graph, Op, Region, Value
from partc.rules import kernels

_MOST = 6  # operations by which a value is made again
_LARGER = 1.1  # the bytes that are read instead, as a multiple of the value's: statistics of rows are small


def with_cheaper_reads(region: Region, sizes: Sizes) -> Region:
    """The region in which later kernels make values again; saved values are in memory anyway."""
    return region.mapped(
        lambda graph: _Reads(graph, region.read_outside(graph), region.values(graph), sizes).rewritten()
    )


class _Reads:
    """The readers of a graph's values, and the smaller values that they could read instead."""

    def __init__(self, graph: Graph, kept: Collection[str], values: Mapping[str, Value], sizes: Sizes) -> None:
        self.graph = graph
        self.kept = kept
        self.bytes = {name: value.type.local_bytes(sizes) for name, value in values.items()}
        self.taken = {*values}
        self.kinds = [kernels.kind(op) for op in graph.ops]
        self.makers = {value.name: index for index, op in enumerate(graph.ops) for value in op.results}
        self.readers: dict[str, list[int]] = {}
        self.depth: list[int] = []  # the number of operations outside kernels on the longest path to each operation
        for index, op in enumerate(graph.ops):
            before = {self.makers[name] for name in op.refs() if name in self.makers}
            self.depth.append(max((self.depth[each] + self._apart(each) for each in before), default=0))
            for name in dict.fromkeys(op.refs()):
                self.readers.setdefault(name, []).append(index)

    def rewritten(self) -> Graph:
        inserted: dict[int, list[Op]] = {}
        renamed: dict[int, dict[str, str]] = {}
        for op in self.graph.ops:
            steps = self._steps(op)
            for readers in self._later(op) if steps else ():
                if fuel.may_rewrite("read again", op.source):
                    names = {step.result.name: unique(step.result.name, self.taken) for step in steps}
                    inserted.setdefault(readers[0], []).extend(_copies(steps, names))
                    for index in readers:
                        renamed.setdefault(index, {})[op.result.name] = names[op.result.name]
        ops: list[Op] = []
        for index, op in enumerate(self.graph.ops):
            ops += inserted.get(index, ())
            ops.append(op.with_operands(renamed[index]) if index in renamed else op)
        return replace(self.graph, ops=tuple(ops))

    def _apart(self, index: int) -> bool:
        """Whether no kernel with other operations can hold this one."""
        return self.kinds[index] in (None, "streamed")

    def _later(self, op: Op) -> list[list[int]]:
        """Readers, by depth, that cannot share a kernel with the value's first readers; none if an operation outside
        kernels reads the value.
        """
        readers = self.readers.get(op.result.name, ())
        if any(self.kinds[index] in (None, "streamed", "view", "gather") for index in readers):
            return []
        behind = self._behind(readers)
        found: dict[int, list[int]] = {}
        for index in readers:
            if index in behind:
                found.setdefault(self.depth[index], []).append(index)
        return [*found.values()] if len(behind.intersection(readers)) < len(readers) else []

    def _behind(self, readers: Sequence[int]) -> set[int]:
        """The readers that depend on the value through an operation outside kernels."""
        last = max(readers)
        seen: set[tuple[int, bool]] = set()
        todo = [(index, False) for index in readers]
        while todo:
            index, crossed = todo.pop()
            crossed = crossed or self._apart(index)
            for value in self.graph.ops[index].results:
                for reader in self.readers.get(value.name, ()):
                    if reader <= last and (reader, crossed) not in seen:
                        seen.add((reader, crossed))
                        todo.append((reader, crossed))
        return {index for index, crossed in seen if crossed}

    def _steps(self, op: Op) -> list[Op]:
        """The operations that make a value again, in order; empty if this is impossible or reads too much."""
        name = op.results[0].name if len(op.results) == 1 else ""
        if name in self.kept or len(self.readers.get(name, ())) < 2 or not self._is_step(self.makers.get(name)):
            return []
        depths = {self.depth[index] for index in self.readers[name]}
        if len(depths) == 1:
            return []
        found = {self.makers[name]}
        read: set[str] = set()
        todo = [self.makers[name]]
        while todo:
            for each in self.graph.ops[todo.pop()].refs():
                maker = self.makers.get(each)
                if each in self.kept or not self._is_step(maker):
                    read.add(each)
                elif maker is not None and maker not in found:
                    found.add(maker)
                    todo.append(maker)
        fewer = sum(self.bytes[each] for each in read) <= _LARGER * self.bytes[name]
        return [self.graph.ops[index] for index in sorted(found)] if len(found) <= _MOST and fewer else []

    def _is_step(self, index: int | None) -> bool:
        """Whether an operation computes each element from those at its place, and draws nothing."""
        return index is not None and self.kinds[index] == "pointwise" and self.graph.ops[index].name not in RANDOM


def _copies(steps: Sequence[Op], names: Mapping[str, str]) -> list[Op]:
    """The operations with other names for their results."""
    return [
        replace(step.renamed(names), results=(replace(step.result, name=names[step.result.name]),)) for step in steps
    ]
