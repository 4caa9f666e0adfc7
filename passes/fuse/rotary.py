"""Rotary embeddings, spelled as slices, products and sums, which kernels compute together with their neighbours.

y = rotary(x, cos, sin, None, False)   ->   y_second  = slice(x, 3, 8, 16, 1)
                                          y_first   = slice(x, 3, 0, 8, 1)
                                          y_neg     = neg(y_second)
                                          y_rotated = cat((y_neg, y_first), 3)
                                          y_mul     = mul(x, cos)
                                          y_mul_1   = mul(y_rotated, sin)
                                          y         = add(y_mul, y_mul_1)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from partc.ir.layout import Sizes, SubDim
from partc.ir.naming import unique
from partc.ir.program import Arg, Graph, Op, Ref, Region, TensorType, Value

_ROTARY = frozenset({"rotary", "rotary_backward"})


def spelled_rotary(region: Region, sizes: Sizes) -> tuple[Region, Mapping[str, str]]:
    """The region with plain operations in place of rotary embeddings and their derivatives.

    Also returns the replaced operation, `rotary` or `rotary_backward`, for the result of each plain operation.
    """
    names: dict[str, str] = {}
    taken = {name for graph in region.graphs for name in graph.definitions()} | {value.name for value in region.params}

    def steps(graph: Graph) -> Iterator[Op]:
        types = region.types(graph)
        for op in graph.ops:
            if op.name in _ROTARY:
                written = _RotationWriter(op=op, types=types, sizes=sizes, taken=taken).write()
                names.update((each.result.name, op.name) for each in written)
                yield from written
            else:
                yield op

    return region.mapped(lambda graph: replace(graph, ops=tuple(steps(graph)))), names


@dataclass(slots=True, kw_only=True)
class _RotationWriter:
    op: Op
    types: Mapping[str, TensorType]
    sizes: Sizes
    taken: set[str]
    ops: list[Op] = field(default_factory=list)

    def write(self) -> list[Op]:
        x, cos, sin, part, interleaved = self.op.args
        assert isinstance(x, Ref) and isinstance(sin, Ref)
        *rows, size = self.types[x.name].layout.local_shape(self.sizes)
        whole, rotated = part is None, part if isinstance(part, int) else size
        head = x if whole else self._slice(x, "head", 0, rotated, 1)
        cos, sin = (self._wide(table, rotated, bool(interleaved)) for table in (cos, sin))
        forward = self.op.name == "rotary"
        first, second = self._pairs(
            head if forward else self._write_elementwise("mul", head, sin), rotated, bool(interleaved)
        )
        parts = (
            (self._write_elementwise("neg", second), first)
            if forward
            else (second, self._write_elementwise("neg", first))
        )
        turned = self._joined(*parts, rotated, bool(interleaved))
        products = (
            self._write_elementwise("mul", head, cos),
            self._write_elementwise("mul", turned, sin) if forward else turned,
        )
        made = self._write_elementwise("add", *products, last=whole)
        if not whole:
            rest = self._slice(x, "rest", rotated, size, 1)
            self._write("cat", ((made, rest), len(rows)), "", (self._columns(size),), last=True)
        return self.ops

    def _wide(self, table: Arg, size: int, interleaved: bool) -> Ref:
        """The table with a column for each element."""
        assert isinstance(table, Ref)
        type = self.types[table.name]
        return (
            table
            if type.layout.local_shape(self.sizes)[-1] == size
            else self._joined(table, table, size, interleaved, like=type)
        )

    def _pairs(self, x: Ref, size: int, interleaved: bool) -> tuple[Ref, Ref]:
        if interleaved:
            return self._slice(x, "first", 0, size, 2), self._slice(x, "second", 1, size, 2)
        return self._slice(x, "first", 0, size // 2, 1), self._slice(x, "second", size // 2, size, 1)

    def _joined(self, first: Ref, second: Ref, size: int, interleaved: bool, *, like: TensorType | None = None) -> Ref:
        """First and second elements joined to pairs; `like` is a type with the same rows, by default the result's."""
        word = "rotated" if like is None else "wide"
        like = like or self.op.result.type
        *rows, _ = like.layout.local_shape(self.sizes)
        if not interleaved:
            return self._write("cat", ((first, second), len(rows)), word, (self._columns(size),), like=like)
        half, pairs = size // 2, self._columns(size // 2)
        columns = tuple(
            self._write("reshape", (part, (*rows, half, 1)), "column", (pairs, (SubDim(1),)), like=like)
            for part in (first, second)
        )
        both = self._write("cat", (columns, len(rows) + 1), "both", (pairs, (SubDim(2),)), like=like)
        return self._write("reshape", (both, (*rows, size)), word, (self._columns(size),), like=like)

    def _slice(self, x: Ref, word: str, start: int, end: int, step: int) -> Ref:
        return self._write("slice", (x, self._dim, start, end, step), word, (self._columns(-((start - end) // step)),))

    def _write_elementwise(self, name: str, *args: Arg, last: bool = False) -> Ref:
        """Write an elementwise operation, of the first operand's size."""
        first = args[0]
        assert isinstance(first, Ref)
        made = {op.result.name: op.result.type for op in self.ops}
        columns = (made.get(first.name) or self.types[first.name]).layout.dims[-1]
        return self._write(name, args, name, (columns,), last=last)

    def _columns(self, size: int) -> tuple[SubDim, ...]:
        """The last dimension of a value with `size` local columns: all of the result's columns, or one for each pair.

        Axes that cut the result's columns keep pairs together, so they cut the pairs as well.
        """
        whole = self.op.result.type.layout.dims[-1]
        axes = tuple(axis for sub in whole for axis in sub.axes)
        if not axes:
            return (SubDim(size),)
        if size == self.op.result.type.layout.local_shape(self.sizes)[-1]:
            return whole
        return (SubDim(size * math.prod(self.sizes[axis] for axis in axes), axes),)

    @property
    def _dim(self) -> int:
        return len(self.op.result.type.shape) - 1

    def _write(
        self,
        name: str,
        args: tuple[Arg, ...],
        word: str,
        tail: tuple[tuple[SubDim, ...], ...],
        *,
        last: bool = False,
        like: TensorType | None = None,
    ) -> Ref:
        """Write an operation whose result has `last` as its last dimension."""
        type = like or self.op.result.type
        layout = replace(type.layout, dims=(*type.layout.dims[:-1], *tail))
        result = self.op.result
        if not last:
            result = Value(name=unique(f"{result.name}_{word}", self.taken), type=replace(type, layout=layout))
        self.ops.append(Op(name=name, args=args, results=(result,), source=self.op.source))
        return Ref(result.name)
