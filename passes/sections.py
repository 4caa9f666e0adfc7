"""Store the rows of a fused projection so that an equal cut gives each rank its part of every section.

    mix_split_0, … = split(mix_qkv, (24, 12, 12), 2)
  ->
    parameter blocks.0.mix.qkv.weight: f32[48, 24] sectioned(0: 2 of 24+12+12)
    mix_split_0, … = split(mix_qkv, (24, 12, 12), 2, ways=2)

Each rank needs whole heads of queries, keys and values. Sections of equal widths can be cut one by one, as a dimension
of sections and rows. Sections of unequal widths cannot, so their rows are stored in another order: the first rank's
rows of all sections, then the second rank's. All operations between the parameters and the split treat these rows
alike, and the split takes each of the `ways` parts apart. Checkpoints, saved files, and optimizers that read whole
parameters have the model's order.

Sections may be split again behind operations that treat them alike, such as the convolution of a Mamba-2 layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from partc import fuel
from partc.ir.layout import Sizes, SubDim
from partc.ir.operations import RANDOM
from partc.ir.program import Op, Program, Ref, Region, Value
from partc.rules import is_elementwise
from partc.rules.rule import argument, integers
from partc.rules.shapes import slice_bounds
from partc.rules.strided_cuts import tensors
from partc.rules.tried import rule_of
from partc.runtime.dims import Sectioned
from partc.sharding.choices import weight_axes
from partc.sharding.pins import Pin

Place = tuple[str, int]  # a value and one of its dimensions
Sections = tuple[int, ...]
# Operations that divide a dimension of their operand, and the position of the argument that names it.
_APART: Mapping[str, int] = {"split": 2, "slice": 1, "unbind": 1, "select": 1}
_Found = Mapping[str, Sequence["_Fusion"]]  # the fused projections of each region


def sections(program: Program, *, pins: Sequence[Pin] = (), orders: Mapping[str, Sectioned] | None = None) -> Program:
    """Store each rank's rows of a fused projection next to each other, if the tensor axes divide all its sections.

    A parameter keeps the model's order if a pin names it, or if another call reads it in that order. If `orders` are
    given, as for an evaluation of trained parameters, only these are chosen, also for pinned parameters.
    """
    ways = math.prod(program.sizes[axis] for axis in weight_axes(program.sizes))
    if ways == 1:
        return program
    found: _Found = {
        region.name: _Projections(_with_splits(region), ways).fusions()
        for region in program.regions
        if not region.batch_over
    }
    read, kept = _orders(program, found), _kept(program, pins if orders is None else ())
    while unlike := {
        name
        for name, each in read.items()
        if len(each) > 1 or name in kept or (orders is not None and each != {orders.get(name)})
    }:
        found = {
            region: [each for each in fusions if unlike.isdisjoint(_stored(program, region, each))]
            for region, fusions in found.items()
        }
        read = _orders(program, found)
    if not read:
        return program
    chosen = {name: order for name, (order,) in read.items()}
    return replace(
        program,
        regions=tuple(_with_ways(region, found.get(region.name, ()), ways) for region in program.regions),
        parameters=tuple(
            item.replaced(sectioned=chosen[item.name]) if item.name in chosen else item for item in program.parameters
        ),
    )


def written_out(op: Op, operand: Value, sizes: Sizes, fresh: Callable[[str], str]) -> Iterator[Op]:
    """The operations of a split of several parts on each rank: a view with a dimension of parts, its split, and the
    joined results.

    The operation's sizes are local. `fresh` makes an unused name from a stem.
    """
    (here,), (dim,) = integers(dict(op.attrs)["ways"]), integers(op.args[2])

    def apart(value: Value) -> Value:
        (rows,), dims = value.type.layout.dims[dim], value.type.layout.dims
        ways = here * math.prod(sizes[axis] for axis in rows.axes)
        parts = (SubDim(ways, rows.axes),), (SubDim(rows.size // ways),)
        layout = replace(value.type.layout, dims=(*dims[:dim], *parts, *dims[dim + 1 :]))
        return Value(name=fresh(f"{value.name}_parts"), type=replace(value.type, layout=layout))

    def view(source: Value, result: Value) -> Op:
        shape = result.type.layout.local_shape(sizes)
        return Op(name="reshape", args=(Ref(source.name), shape), results=(result,), source=op.source)

    whole, pieces = apart(operand), tuple(map(apart, op.results))
    widths = tuple(width // here for width in integers(op.args[1]))
    yield view(operand, whole)
    yield Op(name="split", args=(Ref(whole.name), widths, dim + 1), results=pieces, source=op.source)
    yield from map(view, pieces, op.results)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fusion:
    """A fused projection: the region's parameters with their orders, and the first result of each split."""

    parameters: Mapping[str, Sectioned]
    splits: frozenset[str]


def _orders(program: Program, found: _Found) -> dict[str, set[Sectioned | None]]:
    """The orders in which calls read each parameter of a fused projection; None is the model's order."""
    wanted: dict[tuple[str, str], set[Sectioned | None]] = {}
    for region, fusions in found.items():
        for each in fusions:
            for name, order in each.parameters.items():
                wanted.setdefault((region, name), set()).add(order)
    orders: dict[str, set[Sectioned | None]] = {}
    for call in program.calls:
        for name, value in zip(call.params, program.region(call.region).params, strict=True):
            orders.setdefault(name, set()).update(wanted.get((call.region, value.name), {None}))
    return {name: read for name, read in orders.items() if read != {None}}


def _kept(program: Program, pins: Sequence[Pin]) -> set[str]:
    """The parameters that keep their order: pinned ones, updated ones, and those whose rows differ from the model's."""
    updated = {buffer for buffer, _ in program.updates}
    return {
        item.name
        for item in program.parameters
        if item.holds or item.members or item.sparse or item.balance or item.counts or item.name in updated
        or any(pin.matches(name) for pin in pins for name in (item.name, *item.aliases))
    }  # fmt: skip


def _stored(program: Program, region: str, fusion: _Fusion) -> set[str]:
    """The program's parameters that calls bind to the parameters of a region's fused projection."""
    params = [value.name for value in program.region(region).params]
    return {
        name
        for call in program.calls_to(region)
        for name, own in zip(call.params, params, strict=True)
        if own in fusion.parameters
    }


def _with_ways(region: Region, fusions: Iterable[_Fusion], ways: int) -> Region:
    splits = {name for each in fusions for name in each.splits}
    if not splits:
        return region
    region = _with_splits(region, splits)
    ops = tuple(
        replace(op, attrs=(*op.attrs, ("ways", ways))) if op.results and op.results[0].name in splits else op
        for op in region.forward.ops
    )
    return replace(region, forward=replace(region.forward, ops=ops))


def _with_splits(region: Region, firsts: Collection[str] | None = None) -> Region:
    """The region with one split in place of slices that together cover a dimension. With `firsts`, only slices whose
    first one makes one of these values are replaced.
    """
    types = region.types(region.forward)
    sliced: dict[Place, dict[int, Op]] = {}  # the slices of a dimension, by their first elements
    for op in region.forward.ops:
        if op.name == "slice":
            name = next(op.refs())
            dim, start, _, step = slice_bounds(op, types[name].shape)
            if step == 1:
                sliced.setdefault((name, dim), {}).setdefault(start, op)
    splits: dict[str, Op] = {}
    for (name, dim), by_start in sliced.items():
        starts = sorted(by_start)
        results = tuple(by_start[start].result for start in starts)
        widths = tuple(value.type.shape[dim] for value in results)
        covers = [0, *accumulate(widths)] == [*starts, types[name].shape[dim]]
        if covers and len(starts) > 1 and (firsts is None or results[0].name in firsts):
            split = replace(by_start[0], name="split", args=(Ref(name), widths, dim), results=results)
            splits |= dict.fromkeys((value.name for value in results), split)
    ops: list[Op] = []
    made: set[str] = set()
    for op in region.forward.ops:
        name = op.results[0].name if op.results else ""
        if name not in splits or op.name == "split":
            ops.append(op)
        elif name not in made:
            ops.append(splits[name])
            made |= {value.name for value in splits[name].results}
    return replace(region, forward=replace(region.forward, ops=tuple(ops)))


class _UnlikeError(Exception):
    """An operation does not treat the rows of a fused projection alike."""


@dataclass(slots=True)
class _Alike:
    """The values that are reordered together, the parameters among them, and the splits that read them."""

    places: set[Place] = field(default_factory=set)
    parameters: dict[str, int] = field(default_factory=dict)  # name -> dimension
    splits: dict[str, Op] = field(default_factory=dict)  # by the first result


class _Projections:
    """Finds the fused projections of a region."""

    def __init__(self, region: Region, ways: int) -> None:
        graph = region.forward
        self._ways = ways
        self._ops = graph.ops
        self._types = region.types(graph)
        self._makers, self._readers = graph.makers(), graph.readers()
        self._params = {value.name for value in region.params}
        self._fixed = {*graph.outputs, *(value.name for value in graph.inputs)}

    def fusions(self) -> list[_Fusion]:
        found: list[_Fusion] = []
        taken: set[str] = set()
        for op in self._ops:
            if op.name != "split" or op.results[0].name in taken:
                continue
            try:
                alike = self._alike((next(op.refs()), _dimension(op)))
                fusion = self._fusion(alike)
            except _UnlikeError:
                continue
            taken |= {*alike.splits}
            if fusion is not None and fuel.may_rewrite("sections of projections", op.source):
                taken |= fusion.splits
                found.append(fusion)
        return found

    def _fusion(self, alike: _Alike) -> _Fusion | None:
        """The projection; None if its sections have equal widths, or if the axes do not divide them or their heads."""
        sections, nested = self._sections(alike)
        if len({*sections}) == 1 or any(width % self._ways for width in sections) or not alike.parameters:
            return None
        every = [(sections, alike), *nested]
        splits = {name: op for _, each in every for name, op in each.splits.items()}
        inner = {place for _, each in nested for place in each.places}
        ends = [
            (value.name, _dimension(op))
            for op in splits.values()
            for value in op.results
            if (value.name, _dimension(op)) not in inner
        ]
        if not all(self._fits(place, max(sections)) for place in ends):
            return None
        orders = {
            name: Sectioned(dim, self._ways, widths)
            for widths, each in every
            for name, dim in each.parameters.items()
            if len(widths) > 1
        }
        return _Fusion(parameters=orders, splits=frozenset(splits))

    def _sections(self, alike: _Alike) -> tuple[Sections, list[tuple[Sections, _Alike]]]:
        """The widths of the sections, and the further splits of some of them with their sections.

        Raises _UnlikeError if splits of the same rows differ.
        """
        found: set[Sections] = set()
        nested: list[tuple[Sections, _Alike]] = []
        for op in alike.splits.values():
            widths: list[int] = []
            for value, width in zip(op.results, integers(op.args[1]), strict=True):
                try:
                    further = self._alike((value.name, _dimension(op)), made=True)
                    own, more = self._sections(further) if further.splits else ((width,), [])
                except _UnlikeError:
                    own, more, further = (width,), [], _Alike()
                widths += own
                nested += [(own, further), *more] if further.splits else []
            found.add(tuple(widths))
        if len(found) != 1:
            raise _UnlikeError
        return found.pop(), nested

    def _alike(self, start: Place, *, made: bool = False) -> _Alike:
        """The values that must be reordered together with a value, and the splits that read them. If a split has
        `made` the value, that split is not followed. Raises _UnlikeError if an operation treats rows differently.
        """
        found = _Alike()
        waiting = [start]
        while waiting:
            place = waiting.pop()
            if place in found.places:
                continue
            found.places.add(place)
            name, dim = place
            if name in self._fixed:
                raise _UnlikeError
            if name in self._params and found.parameters.setdefault(name, dim) != dim:
                raise _UnlikeError
            maker = self._makers.get(name)
            if maker is not None and not (made and place == start):
                waiting += self._carriers(maker, place)
            for op in self._readers.get(name, ()):
                if op.name == "split" and _dimension(op) == dim:
                    found.splits[op.results[0].name] = op
                else:
                    waiting += self._carriers(op, place)
        return found

    def _carriers(self, op: Op, place: Place) -> Iterator[Place]:
        """The operands and results of an operation that have the same rows, which must be a whole dimension of each."""
        rule = rule_of(op, self._types) if op.name not in RANDOM else None
        if rule is None:
            raise _UnlikeError
        name, dim = place
        every = list(tensors(op, rule))
        factors = {dims[dim] for each, dims in every if each == name}
        if len(factors) != 1 or len(rows := factors.pop()) != 1 or rule.factor(rows[0]).kind != "parallel":
            raise _UnlikeError
        for each, dims in every:
            for index, parts in enumerate(dims):
                if parts == rows:
                    yield each, index
                elif rows[0] in parts:
                    raise _UnlikeError

    def _fits(self, place: Place, most: int) -> bool:
        """Whether a part of a section is a number of heads, or a section narrower than `most` is one head for several
        ranks. Sections that are taken apart in another way do not fit.
        """
        name, dim = place
        for op in self._readers.get(name, ()):
            if op.name in _APART and dim == _dimension(op):
                return False
            if op.name == "reshape" or op.name == "permute" or is_elementwise(op.name):
                rule = rule_of(op, self._types)
                if rule is None:
                    continue
                every = list(tensors(op, rule))
                factors = next(dims[dim] for each, dims in every if each == name)
                if not factors:
                    continue
                heads = rule.factor(factors[0]).size
                narrow = self._types[name].shape[dim] < most and self._ways % heads == 0
                if heads % self._ways and not narrow:
                    return False
                (dims,) = rule.results
                at = next((index for index, parts in enumerate(dims) if parts[:1] == factors[:1]), None)
                if heads % self._ways == 0 and at is not None and not self._fits((op.result.name, at), most):
                    return False
        return True


def _dimension(op: Op) -> int:
    """The dimension that an operation divides."""
    (dim,) = integers(argument(op, _APART[op.name], "dim", 0))
    return dim
