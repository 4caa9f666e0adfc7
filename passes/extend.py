"""Pad sequences that cp does not divide: added positions repeat the last one, and nothing counts them.

    slice_1      = slice(linear_12, 1, 0, 15, 1)                       # f32[4, 15, 32]
    slice_2      = slice(ids, 1, 1, 16, 1)                             # i64[4, 15]
    nll…         = cross_entropy(slice_1, slice_2, …)                  # f32[4, 15]
    nll_sum      = sum(nll…, (0, 1), False)
  ->
    slice_2      = slice(ids, 1, 1, 16, 1)                             # i64[4, 15]
    slice_2_last = slice(slice_2, 1, 14, 15, 1)                        # i64[4, 1]
    slice_2_more = expand(slice_2_last, (4, 1))                        # i64[4, 1]
    slice_2_ext… = cat((slice_2, slice_2_more), 1)                     # i64[4, 16]
    nll…         = cross_entropy(linear_12, slice_2_ext…, …)           # f32[4, 16]
    position     = arange(16)                                          # i64[16]
    added        = ge(position, 15)                                    # bool[16]
    nll…counted  = masked_fill(nll…, added, 0)                         # f32[4, 16]
    nll_sum      = sum(nll…counted, (0, 1), False)

Starting from attention, the longer sequence spreads through every operation that treats positions alike, back to the
origins of sequences: ids, labels, position numbers, masks. There positions are added. Sums over positions get zeros for
the added ones. Anything else reads the true positions: keys and values of attention that is not causal, a convolution,
a result of the model. A slice that drops the last positions of a sequence (`logits[:, :-1]`) is also extended, by one
position more.

Added positions have the numbers of the last position, hence finite ones. Their gradients are zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from partc import fuel
from partc.errors import Source
from partc.ir.attention import ROWS, Attention
from partc.ir.mesh import CONTEXT_AXIS
from partc.ir.naming import COUNTED, EXTENDED, unique
from partc.ir.operations import RANDOM
from partc.ir.program import Arg, Op, Program, Ref, Region, TensorType, Value
from partc.passes.sequences import (
    ORDERED,
    SUMS,
    Place,
    carriers,
    drawn_dims,
    draws_apart,
    factor_at,
    is_causal,
    numbered,
    with_form,
)
from partc.rules import OpRule, is_users, resolve
from partc.rules.local import SHAPES
from partc.rules.rule import Dims
from partc.rules.shapes import copies, slice_bounds
from partc.rules.strided_cuts import tensors
from partc.sharding.choices import weight_axes
from partc.sharding.pins import Pin

_SPARE = 16  # the tensor axes may add at most 1/16 of the positions
_MOST = 2  # the most positions after the extension, as a multiple of those before
_ALONG = frozenset({"slice", "split", "repeat_interleave"})  # their arguments count elements of a dimension


class Extent(NamedTuple):
    """The number of a sequence's positions, and the number with the added ones."""

    true: int
    whole: int


def extend(program: Program, *, pins: Sequence[Pin] = ()) -> Program:
    """Extend the sequences of attention to multiples of the ranks of cp, or of twice as many for a causal mask."""
    n = program.sizes.get(CONTEXT_AXIS, 1)
    (main,) = program.regions
    if n == 1:
        return program
    ways = math.prod(program.sizes[axis] for axis in weight_axes(program.sizes))
    types = main.types(main.forward)
    steps: dict[int, int] = {}
    ops = tuple(with_form(op, types, n, n * ways, pins) for op in main.forward.ops)
    main = replace(main, forward=replace(main.forward, ops=ops))
    program = replace(program, regions=(main,))
    found = [(op, attention) for op in ops if (attention := Attention.of(op)) and len(op.results[0].type.shape) == 4]
    for _, attention in found:
        for name in (attention.q, attention.k):
            size = types[name].shape[ROWS]
            steps[size] = max(steps.get(size, 1), 2 * n if attention.by_rows else n)
    extents = {size: Extent(size, _extended_size(size, step, ways)) for size, step in steps.items()}
    sequences = _LongerSequences(main, extents, max(steps.values(), default=1) * ways)
    try:
        sequences.follow(found)
    except _UnclearError:
        return program
    if not sequences.longer or not fuel.may_rewrite("extended sequences"):
        return program
    return replace(program, regions=(sequences.region(),))


def _extended_size(size: int, step: int, ways: int) -> int:
    """The least multiple of `step * ways`, or of `step` if that adds too many positions; `size` itself if both do."""
    if size % step == 0:
        return size
    fine, coarse = (-(-size // each) * each for each in (step, step * ways))
    whole = coarse if (coarse - size) * _SPARE <= size else fine
    return whole if whole <= _MOST * size else size


class _UnclearError(Exception):
    """A dimension holds several sequences."""


@dataclass(slots=True)
class _LongerSequences:
    main: Region
    extents: dict[int, Extent]  # size of a sequence of attention -> its extent
    least: int  # slices with fewer positions are other sequences
    types: dict[str, TensorType] = field(init=False)
    rules: dict[int, OpRule | None] = field(init=False)  # by the id of the operation
    # (value, dimension) -> (outer, extent).
    places: dict[tuple[str, int], tuple[int, Extent]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.types = self.main.types(self.main.forward)
        self.rules = {id(op): resolve(op, self.types) for op in self.main.forward.ops}

    @property
    def longer(self) -> bool:
        """Whether any sequence has added positions."""
        return any(extent.true != extent.whole for _, extent in self.places.values())

    def follow(self, attentions: Sequence[tuple[Op, Attention]]) -> None:
        """Find every place that holds a longer sequence. Raises _UnclearError if a dimension would hold two."""
        graph = self.main.forward
        makers, readers = graph.makers(), graph.readers()
        queue: list[tuple[Place, Extent]] = []
        for op, attention in attentions:
            rows, columns = (self.extents[self.types[name].shape[ROWS]] for name in (attention.q, attention.k))
            queue += [((name, ROWS, 1), rows) for name in (attention.q, op.results[0].name)]
            if self._reads_added(attention, columns):
                queue += [((name, ROWS, 1), columns) for name in (attention.k, attention.v)]
        while queue:
            (name, dim, outer), extent = queue.pop()
            known = self.places.get((name, dim))
            if known is not None and known != (outer, extent):
                raise _UnclearError
            if known is not None:
                continue
            self.places[name, dim] = outer, extent
            for op in (*([makers[name]] if name in makers else []), *readers.get(name, ())):
                queue += self._beside(op, (name, dim, outer), extent)

    def _beside(self, op: Op, place: Place, extent: Extent) -> Iterator[tuple[Place, Extent]]:
        """The places in operands and results of an operation that hold the sequence of this place, or a prefix."""
        for factor, inside in self.through(op, place, extent):
            rule = self.rules[id(op)]
            assert rule is not None
            yield from ((other, extent) for other in carriers(op, rule, (factor,), inside))
        name, dim, outer = place
        shorter = self.prefix(op)
        if shorter is None or (dim, outer) != (shorter[0], 1):
            return
        size, source, result = shorter[1], next(op.refs()), op.results[0].name
        if name == source and extent.true >= size >= extent.whole - self.least:
            yield (result, dim, 1), Extent(size, extent.whole)
        elif name == result:
            longer = self.extents.get(self.types[source].shape[dim])
            if longer is not None and longer.whole == extent.whole:
                yield (source, dim, 1), longer

    def _reads_added(self, attention: Attention, columns: Extent) -> bool:
        """Whether keys and values may have added positions, because no true row reads them."""
        return columns.true == columns.whole or is_causal(attention, self.types) or bool(attention.limits)

    def prefix(self, op: Op) -> tuple[int, int] | None:
        """The dimension and size of a slice of the first positions; None for other operations."""
        if op.name != "slice":
            return None
        dim, start, end, step = slice_bounds(op, self.types[next(op.refs())].shape)
        return (dim, end) if start == 0 and step == 1 else None

    def through(self, op: Op, place: Place, extent: Extent) -> Iterator[tuple[str, int]]:
        """The factors that hold the sequence where an operation treats its positions alike."""
        rule = self.rules[id(op)]
        name, dim, outer = place
        if rule is None or op.name in ORDERED or is_users(op.name):
            return
        if draws_apart(op, self.types[name], dim, outer, extent.true):
            return
        for each, dims in tensors(op, rule):
            spot = factor_at(rule, dims, dim, outer, extent.true) if each == name else None
            if spot is not None and self._treats_alike(op, rule, spot[0], extent) and not self._counts(op, name, dim):
                yield spot

    def _treats_alike(self, op: Op, rule: OpRule, name: str, extent: Extent) -> bool:
        """Whether an operation treats the positions of a factor alike, or sums over them."""
        attention = Attention.of(op)
        if attention is not None and name in rule.ring:
            if name != rule.ring[0]:
                return self._reads_added(attention, extent)
            near = not attention.causal and 0 < attention.window <= extent.whole - extent.true
            return not near  # otherwise added rows would read nothing
        factor = rule.factor(name)
        if dict(rule.sharded).get(name) or factor.kind == "blocked":
            return False
        return factor.kind == "parallel" or op.name in SUMS

    def _counts(self, op: Op, name: str, dim: int) -> bool:
        """Whether the arguments of an operation count elements of this dimension."""
        if op.name not in _ALONG or name not in {*op.refs(), *(value.name for value in op.results)}:
            return False
        at = op.args[1 if op.name == "slice" else 2]
        return not isinstance(at, int) or at % len(self.types[name].shape) == dim

    def region(self) -> Region:
        return _LongerRegion(self).run()


@dataclass(slots=True)
class _LongerRegion:
    """Rewrites a region with longer sequences."""

    found: _LongerSequences
    taken: set[str] = field(init=False)
    ops: list[Op] = field(default_factory=list)
    # (value, its extended dimensions) -> name.
    forms: dict[tuple[str, frozenset[int]], str] = field(default_factory=dict)
    shapes: dict[str, TensorType] = field(default_factory=dict)  # types of new values, and of values that became longer
    added: dict[tuple[Extent, int, int, int], str] = field(default_factory=dict)  # masks of added positions
    reader: Source | None = None  # source of the operation whose operands are rewritten

    def __post_init__(self) -> None:
        self.taken = {*self.found.types}

    def run(self) -> Region:
        main = self.found.main
        graph = main.forward
        for value in (*main.params, *graph.inputs):
            self._record_value(value, frozenset())
        for op in graph.ops:
            self._rewritten(op)
        outputs = tuple(self._form(name, frozenset()) for name in graph.outputs)
        return replace(main, forward=replace(graph, ops=tuple(self.ops), outputs=outputs))

    def _extended_dims(self, name: str) -> frozenset[int]:
        """The dimensions of a value that are extended."""
        rank = len(self.found.types[name].shape)
        known = ((dim, self.found.places.get((name, dim))) for dim in range(rank))
        return frozenset(dim for dim, each in known if each is not None and each[1].true != each[1].whole)

    def _wider(self, type: TensorType, name: str, dims: frozenset[int]) -> TensorType:
        shape = list(type.shape)
        for dim in dims:
            _, extent = self.found.places[name, dim]
            shape[dim] = shape[dim] // extent.true * extent.whole
        return type.shaped(shape)

    def _record_value(self, value: Value, dims: frozenset[int]) -> None:
        """Record a value in which the dimensions `dims` are extended, and extend its other sequence dimensions."""
        self.forms[value.name, dims] = value.name
        here, missing = value.name, self._extended_dims(value.name) - dims
        for dim in sorted(missing):
            here = self._extended(here, value.name, dim)
            dims |= {dim}
            self.forms[value.name, dims] = here

    def _rewritten(self, op: Op) -> None:
        if self._passed_on(op):
            return
        rule = self.found.rules[id(op)]
        if rule is None:
            self.ops.append(op.reading([self._form(name, frozenset()) for name in op.refs()]))
            for value in op.results:
                self._record_value(value, frozenset())
            return
        operands = list(zip(op.refs(), rule.operands, strict=True))
        self.reader = op.source
        wanted = [self._form(name, self._passing(op, rule, name, dims)) for name, dims in operands]
        self.reader = None
        self._mask_sums(op, rule, wanted)
        made = [self._passing(op, rule, each.name, dims) for each, dims in zip(op.results, rule.results, strict=True)]
        results = tuple(
            replace(value, type=self._wider(value.type, value.name, dims))
            for value, dims in zip(op.results, made, strict=True)
        )
        self.shapes.update((value.name, value.type) for value in results)
        new = replace(op.reading(wanted), results=results)
        place = SHAPES.get(op.name)
        if place is not None:
            new = replace(new, args=(*new.args[:place], new.result.type.shape, *new.args[place + 1 :]))
        if op.name == "repeat":
            new = replace(new, args=(new.args[0], copies(self._type(next(new.refs())).shape, new.result.type.shape)))
        if op.name in RANDOM:
            new = self._drawing(new, op, rule, made[0])
        self.ops.append(new)
        for value, dims in zip(op.results, made, strict=True):
            self._record_value(value, dims)

    def _passed_on(self, op: Op) -> bool:
        """Whether a slice drops the last positions of a sequence, which then become added positions."""
        shorter = self.found.prefix(op)
        if shorter is None:
            return False
        source, made = next(op.refs()), op.results[0].name
        there, here = (self.found.places.get((name, shorter[0])) for name in (source, made))
        if there is None or here is None or there[1].whole != here[1].whole or here[1].true != shorter[1]:
            return False
        self.forms[made, self._extended_dims(made)] = self._form(source, self._extended_dims(source))
        return True

    def _drawing(self, new: Op, op: Op, rule: OpRule, dims: frozenset[int]) -> Op:
        """The operation with its random numbers numbered by the positions before sequences are extended."""
        for dim in drawn_dims(op, dims):
            new = numbered(new, (dim,), self.found.places[op.results[0].name, dim][1].true)
        attention = Attention.of(op)
        if attention is not None and ROWS in self._passing(op, rule, attention.k, rule.operands[1]):
            new = numbered(new, (ROWS + 1,), self.found.places[attention.k, ROWS][1].true)
        return new

    def _passing(self, op: Op, rule: OpRule, name: str, dims: Dims) -> frozenset[int]:
        """The dimensions of an operand or result that are extended when an operation is."""
        kept = set()
        for dim in self._extended_dims(name):
            outer, extent = self.found.places[name, dim]
            spot = factor_at(rule, dims, dim, outer, extent.true)
            if spot is not None and spot in list(self.found.through(op, (name, dim, outer), extent)):
                kept.add(dim)
        return frozenset(kept)

    def _mask_sums(self, op: Op, rule: OpRule, wanted: list[str]) -> None:
        """For each sum over a sequence, set the added positions to zero in the first operand that has them."""
        done: set[str] = set()
        for index, (name, dims) in enumerate(zip(op.refs(), rule.operands, strict=True)):
            for dim in sorted(self._passing(op, rule, name, dims)):
                outer, extent = self.found.places[name, dim]
                spot = factor_at(rule, dims, dim, outer, extent.true)
                if spot is not None and rule.factor(spot[0]).kind == "contracted" and spot[0] not in done:
                    done.add(spot[0])
                    wanted[index] = self._zeroed(wanted[index], dim, outer, extent)

    def _add(self, word: str, op: str, args: tuple[Arg, ...], type: TensorType, shape: Sequence[int]) -> str:
        value = Value(name=unique(word, self.taken), type=type.shaped(shape))
        self.shapes[value.name] = value.type
        self.ops.append(Op(name=op, args=args, results=(value,), source=self.reader))
        return value.name

    def _type(self, name: str) -> TensorType:
        return self.shapes.get(name) or self.found.types[name]

    def _extended(self, name: str, base: str, dim: int) -> str:
        """The value with its last position repeated."""
        type, (_, (true, whole)) = self._type(name), self.found.places[base, dim]
        here, inner = self._apart(name, base, dim, true)
        shape = self._type(here).shape
        one, many, every = ([*shape[:inner], n, *shape[inner + 1 :]] for n in (1, whole - true, whole))
        last = self._add(f"{base}_last", "slice", (Ref(here), inner, true - 1, true, 1), type, one)
        more = self._add(f"{base}_more", "expand", (Ref(last), tuple(many)), type, many)
        made = self._add(f"{base}{EXTENDED}", "cat", ((Ref(here), Ref(more)), inner), type, every)
        return made if here == name else self._joined(made, f"{base}{EXTENDED}", type, dim, inner)

    def _apart(self, name: str, base: str, dim: int, size: int) -> tuple[str, int]:
        """The value with its sequence of `size` positions as a separate dimension, and this dimension."""
        type, (outer, _) = self._type(name), self.found.places[base, dim]
        if type.shape[dim] == size:
            return name, dim
        shape = [*type.shape[:dim], outer, size, type.shape[dim] // (outer * size), *type.shape[dim + 1 :]]
        return self._add(f"{base}_apart", "reshape", (Ref(name), tuple(shape)), type, shape), dim + 1

    def _joined(self, name: str, word: str, like: TensorType, dim: int, inner: int) -> str:
        """The value with its sequence, dimension `inner`, merged back into dimension `dim`."""
        size = math.prod(self._type(name).shape[dim : inner + 2])
        shape = [*like.shape[:dim], size, *like.shape[dim + 1 :]]
        return self._add(word, "reshape", (Ref(name), tuple(shape)), like, shape)

    def _form(self, name: str, dims: frozenset[int]) -> str:
        """The form of a value in which exactly the dimensions `dims` are extended."""
        if (name, dims) not in self.forms:
            full = self._extended_dims(name)
            here = self.forms[name, full]
            for dim in sorted(full - dims):
                here = self._without_added(here, name, dim)
            self.forms[name, dims] = here
        return self.forms[name, dims]

    def _without_added(self, name: str, base: str, dim: int) -> str:
        """The value without the added positions of a dimension."""
        type, (_, (true, whole)) = self._type(name), self.found.places[base, dim]
        here, inner = self._apart(name, base, dim, whole)
        shape = self._type(here).shape
        kept = [*shape[:inner], true, *shape[inner + 1 :]]
        made = self._add(f"{base}_true", "slice", (Ref(here), inner, 0, true, 1), type, kept)
        return made if here == name else self._joined(made, f"{base}_true", type, dim, inner)

    def _zeroed(self, name: str, dim: int, outer: int, extent: Extent) -> str:
        """The value with zeros at added positions."""
        type = self._type(name)
        after, rest = type.shape[dim] // (outer * extent.whole), len(type.shape) - dim - 1
        key = (extent, outer, after, rest)
        bools = TensorType.replicated("bool", ())
        if key not in self.added:
            numbers = TensorType.replicated("i64", ())
            at = self._add("position", "arange", (extent.whole,), numbers, (extent.whole,))
            here = self._add("added", "ge", (Ref(at), extent.true), bools, (extent.whole,))
            if outer * after > 1:
                wide = (outer, extent.whole, after)
                here = self._add(here, "reshape", (Ref(here), (1, extent.whole, 1)), bools, (1, extent.whole, 1))
                here = self._add(here, "expand", (Ref(here), wide), bools, wide)
                here = self._add(here, "reshape", (Ref(here), (math.prod(wide),)), bools, (math.prod(wide),))
            if rest:
                shape = (type.shape[dim], *(1,) * rest)
                here = self._add(here, "reshape", (Ref(here), shape), bools, shape)
            self.added[key] = here
        args = (Ref(name), Ref(self.added[key]), 0)
        return self._add(f"{name}{COUNTED}", "masked_fill", args, type, type.shape)
