"""The dimensions of a program that have equal sizes by construction, and not by coincidence.

    x: f32[16@dp, 32, 64]                    x: [16, 32, 64]          sizes 16, 32, 64, 4 and 16'
    w: f32[64@tp, 64]                        w: [4·16', 64]
    y = linear(x, w)                  ->     y: [16, 32, 4·16']
    z = reshape(y, (16, 32, 4, 16))          z: [16, 32, 4, 16']

The evidence is in the rules of operations: dimensions that carry the same factor have the same size, and a view cuts a
size into the factors of its product. A size that occurs nowhere else is a symbol of its own, even if other sizes happen
to have the same value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from partc.ir.layout import Layout, SubDim
from partc.ir.naming import gradient_owner
from partc.ir.program import Graph, Op, Program, Region, TensorType, Value
from partc.rules import flops, resolve_lowered
from partc.rules.rule import Dims, OpRule

SHORT = 2  # the most elements that may be cut off a dimension; a larger difference is a share of it
Key = tuple[str, str]  # a region, or "" for the program, and one of its values


class Sizes:
    """Symbols of sizes, merged when found equal, or equal to a product. Numbers represent the symbols."""

    def __init__(self) -> None:
        self.value: list[int] = []
        self._same: list[int] = []
        self._parts: dict[int, tuple[int, ...]] = {}

    def new(self, value: int) -> int:
        self.value.append(value)
        self._same.append(len(self._same))
        return len(self._same) - 1

    def parts(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The same product as uncut symbols, from major to minor, without ones."""
        stack = list(reversed(sizes))
        return tuple(iter(lambda: self._pop_major(stack), None))

    def equate(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Merge two products, read from major to minor. Stops if neither size is a multiple of the other."""
        one, two = list(reversed(left)), list(reversed(right))
        while True:
            a, b = self._pop_major(one), self._pop_major(two)
            if a is None or b is None:
                return
            if self.value[a] == self.value[b]:
                self._same[max(a, b)] = min(a, b)
                continue
            (small, _), (large, many) = sorted(((a, one), (b, two)), key=lambda pair: self.value[pair[0]])
            times, rest = divmod(self.value[large], self.value[small])
            if rest:
                return
            many.append(self.new(times))
            self._parts[large] = (small, many[-1])

    def _pop_major(self, stack: list[int]) -> int | None:
        """Pop the major symbol of a product from the stack that holds its symbols."""
        while stack:
            size = self._root(stack.pop())
            if size in self._parts:
                stack.extend(reversed(self._parts[size]))
            elif self.value[size] != 1:
                return size
        return None

    def _root(self, size: int) -> int:
        while self._same[size] != size:
            size = self._same[size]
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedSubDim:
    """A sub-dimension of a layout: its size, and the axes that cut it."""

    size: int
    axes: tuple[str, ...]


Dim = tuple[SizedSubDim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSum:
    """A dimension whose length is a sum of other lengths and a constant, after padding, slicing or joining."""

    whole: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    more: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product: the sizes of its loops, the axes that cut some of them, and the computed share."""

    sizes: tuple[int, ...]
    axes: frozenset[str]
    share: Fraction


class Dimensions:
    """The symbolic sizes of every value of a program, whatever passes have run."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sizes = Sizes()
        self.dims: dict[Key, tuple[Dim, ...]] = {}
        self.types: dict[Key, TensorType] = {}
        self.roles: dict[str, list[int]] = {}  # a rule's name of a factor: "attention.g", "embedding.v"
        self.sums: list[SizeSum] = []
        self.work: dict[Key, tuple[Product, ...]] = {}  # of the operation that computes a value
        for value in program.values:
            self._declare("", value)
        batch = [self.dims["", name][:1] for name in program.batch_entries]
        for entry in batch[1:]:
            self._match(batch[0], entry)
        for region in program.regions:
            self._region(region)
        for call in program.calls:
            region = program.region(call.region)
            inputs = zip((value.name for value in region.forward.inputs), call.args, strict=True)
            outputs = zip(region.forward.outputs, call.results, strict=False)
            for inner, outer in (*inputs, *outputs):
                if (call.region, inner) in self.dims and ("", outer) in self.dims:
                    self._match(self.dims[call.region, inner], self.dims["", outer])

    def whole(self, dim: Dim) -> tuple[int, ...]:
        """The sizes whose product is a dimension's global length."""
        return self.sizes.parts([piece.size for piece in dim])

    def _region(self, region: Region) -> None:
        for value in region.params:
            self._declare(region.name, value)
        for graph in region.graphs:
            for value in graph.inputs:
                self._declare(region.name, value)
            self._graph(region.name, graph)

    def _graph(self, region: str, graph: Graph) -> None:
        for outer in graph.ops:
            for op in (*outer.body, outer) if outer.body else (outer,):
                if op.name != "fused":
                    self._operation(region, op)

    def _declare(self, region: str, value: Value) -> None:
        """Declare a value under its own type, unless forward has already declared it for backward."""
        key = region, value.name
        sizes = self.program.sizes
        known = self.types.get(key)
        if known and (known.shape == value.type.shape or known.local(sizes).shape == value.type.local(sizes).shape):
            return
        self.types[key] = value.type
        self.dims[key] = tuple(
            tuple(SizedSubDim(size=self.sizes.new(sub.size), axes=sub.axes) for sub in dim)
            for dim in value.type.layout.dims
        )
        of = self.dims.get((region, gradient_owner(value.name)), ())
        if len(of) == len(self.dims[key]):
            self._match(self.dims[key], of)  # a gradient has the size of its value

    def _operation(self, region: str, op: Op) -> None:
        operands = [(region, name) for name in op.refs()]
        if any(key not in self.dims for key in operands):
            return
        for value in op.results:
            self._declare(region, replace(value, type=self._spread(region, op, value.type)))
        rule = self._rule(region, op, {name: self.types[region, name] for name in op.refs()})
        results = [(region, value.name) for value in op.results]
        if rule is not None:
            factors = {factor.name: self.sizes.new(factor.size) for factor in rule.factors}
            factored = [*zip(operands, rule.operands, strict=True), *zip(results, rule.results, strict=False)]
            chance = _chance(rule)
            for key, dims in factored:
                self._carry(key, dims, {name: size for name, size in factors.items() if name not in chance})
            self._sum(op, factored)
            for name, size in factors.items():
                self.roles.setdefault(f"{op.name}.{name}", []).append(size)
            if rule.work and results:
                self.work[results[0]] = tuple(
                    self._product(op, rule, product, factored, factors) for product in rule.work
                )
        unknown = results[len(rule.results) :] if rule is not None else results
        for key in unknown:
            self._as_others(key, (*operands, *results))

    def _product(
        self,
        op: Op,
        rule: OpRule,
        product: tuple[str, ...],
        factored: Sequence[tuple[Key, Dims]],
        factors: Mapping[str, int],
    ) -> Product:
        axes = {
            axis
            for key, dims in factored
            for dim, names in zip(self.dims[key], dims, strict=True)
            for piece in dim
            for axis in piece.axes
            if set(names) & set(product)
        }
        share = Fraction(flops(op, rule), rule.flops)
        return Product(sizes=tuple(factors[name] for name in product), axes=frozenset(axes), share=share)

    def _carry(self, key: Key, dims: Dims, factors: Mapping[str, int]) -> None:
        for dim, names in zip(self.dims[key], dims, strict=True):
            if names and all(name in factors for name in names):
                self.sizes.equate([piece.size for piece in dim], [factors[name] for name in names])

    def _sum(self, op: Op, factored: Sequence[tuple[Key, Dims]]) -> None:
        """Record the relation of lengths along the dimension that an operation pads, slices or joins."""
        if op.name not in ("cat", "slice", "pad", "constant_pad_nd"):
            return
        *given, made = (self.dims[key] for key, _ in factored)
        lengths = [[self._size(dim) for dim in dims] for dims in (*given, made)]
        for index, length in enumerate(lengths[-1]):
            before = [each[index] for each in lengths[:-1]]
            across = op.name == "cat" and sum(before) != length
            part = op.name == "slice" and before[0] > length + SHORT
            if before[0] != length and not across and not part:
                whole, *parts = (tuple(piece.size for piece in dims[index]) for dims in (made, *given))
                self.sums.append(SizeSum(whole=whole, parts=tuple(parts), more=length - sum(before)))

    def _rule(self, region: str, op: Op, types: Mapping[str, TensorType]) -> OpRule | None:
        """The operation's rule for global shapes. It covers all results, or only the first if the others are
        statistics.
        """
        typed = tuple(replace(value, type=self.types[region, value.name]) for value in op.results)
        return resolve_lowered(replace(op, results=typed), types)

    def _spread(self, region: str, op: Op, type: TensorType) -> TensorType:
        """The type of a result with a local shape, with its dimensions cut like those of the operands."""
        if type.layout.sharded_axes or not type.shape:
            return type
        given = {name: self.types[region, name].local(self.program.sizes) for name in op.refs()}
        rule = resolve_lowered(replace(op, results=(Value(name="", type=type),)), given)
        dims = tuple(
            next(self._cuts(region, op, rule, given, index, type), dim) for index, dim in enumerate(type.layout.dims)
        )
        return replace(type, layout=replace(type.layout, dims=dims))

    def _cuts(
        self, region: str, op: Op, rule: OpRule | None, given: Mapping[str, TensorType], index: int, type: TensorType
    ) -> Iterator[tuple[SubDim, ...]]:
        """The local cuts of operands along the factors of a result's dimension."""
        sizes = self.program.sizes
        for place, name in enumerate(op.refs()):
            whole = self.types[region, name].layout
            if rule is not None and len(rule.results[0]) == len(type.shape):
                lengths = {factor.name: factor.size for factor in rule.factors}
                parts: dict[str, tuple[SubDim, ...]] = {}
                for names, dim in zip(rule.operands[place], whole.dims, strict=True):
                    parts.update(_local_factors(names, dim, lengths, sizes))
                carried = rule.results[0][index]
                found = tuple(sub for factor in carried for sub in parts.get(factor, ()))
                same = [found] if all(factor in parts for factor in carried) else []
            else:
                near = index < len(whole.dims) and abs(len(whole.dims) - len(type.shape)) <= 1
                same = [whole.dims[index]] if near else []
            for dim in same:
                (length,), (every,) = (Layout((dim,)).local_shape(sizes), Layout((dim,)).shape)
                if dim and length == type.shape[index] != every:
                    yield dim

    def _as_others(self, key: Key, others: Sequence[Key]) -> None:
        """For a result without a rule: match it with operands of equal size but for one dimension."""
        shape = self.types[key].shape
        for other in others:
            there = self.types[other].shape
            if other != key and abs(len(there) - len(shape)) <= 1:
                differing = sum(one != two for one, two in zip(shape, there, strict=False)) + abs(
                    len(there) - len(shape)
                )
                if differing <= 1:
                    self._match(self.dims[key], self.dims[other])

    def _match(self, left: Sequence[Dim], right: Sequence[Dim]) -> None:
        """Merge the dimensions at equal positions if their lengths agree."""
        for one, two in zip(left, right, strict=False):
            if self._size(one) == self._size(two):
                self.sizes.equate([piece.size for piece in one], [piece.size for piece in two])

    def _size(self, dim: Dim) -> int:
        return math.prod(self.sizes.value[piece.size] for piece in dim)


def _chance(rule: OpRule) -> frozenset[str]:
    """The factors of a cut or joined dimension whose pieces have a common divisor that is not itself a piece.

    If two of them are equal, this proves nothing.
    """
    pieces = {
        names[0] for dims in (*rule.operands, *rule.results) for names in dims if len(names) == 2 and names[1] == "u"
    }
    single = any(names == ("u",) for dims in (*rule.operands, *rule.results) for names in dims)
    return frozenset({"u", *pieces}) if pieces and not single else frozenset()


def _local_factors(
    names: Sequence[str], dim: Sequence[SubDim], lengths: Mapping[str, int], sizes: Mapping[str, int]
) -> dict[str, tuple[SubDim, ...]]:
    """The local sub-dimensions of each factor of a dimension, for factors that consist of whole sub-dimensions."""
    found: dict[str, tuple[SubDim, ...]] = {}
    left = list(dim)
    for name in names:
        taken: list[SubDim] = []
        while left and Layout((tuple(taken),)).local_shape(sizes)[0] < lengths[name]:
            taken.append(left.pop(0))
        if Layout((tuple(taken),)).local_shape(sizes)[0] != lengths[name]:
            break
        found[name] = tuple(taken)
    return found
