"""Formulas of the memory, traffic and flops of calls, in the model's sizes and the axes of the mesh.

    block: saved by a call for its backward pass    b·s·h·(34 + 5·a·s/h)/tp

A formula covers the tensors of the compiled program, with names in place of the numbers of their dimensions. At the
model's own sizes it gives the bytes of that program. At other sizes it holds as long as compiling makes the same
decisions there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partc.cost.formulas.size_names import Named, SizeNames, symbol, value_of
from partc.cost.formulas.symbols import Dimensions
from partc.cost.saved_tensors import held_inputs, memory_of, microbatches_in_flight, saved_values
from partc.ir.collectives import MOVING
from partc.ir.mesh import PIPELINE_AXIS
from partc.ir.program import ITEMSIZE, Graph, Op, Parameter, Program, Region

if TYPE_CHECKING:
    from sympy import Expr

ADAMW = 2  # values that the optimizer keeps for each element of a parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBytes:
    """The tensors with one name, and their total bytes."""

    name: str
    bytes: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFormulas:
    """A forward or backward pass of one call: the peak of its temporary bytes, the bytes that a rank receives over each
    axis, and the flops of its matrix products.
    """

    name: str
    working: Expr
    moved: Mapping[str, Expr]
    flops: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFormulas:
    """The formulas of one call of a region, on one rank, for one microbatch."""

    name: str
    calls: int
    parameters: Expr  # bytes, as the call reads them
    saved: tuple[NamedBytes, ...]
    passes: tuple[PassFormulas, ...]

    @property
    def saved_bytes(self) -> Expr:
        return _total(term.bytes for term in self.saved)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFormulas:
    """The formulas of the ranks at one coordinate on the pipeline axis, in bytes."""

    place: int
    parameters: Expr  # as the rank keeps them: in parts, where ZeRO cuts them
    gradients: Expr
    optimizer: Expr
    saved: Expr  # at the largest number of microbatches in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Formulas:
    """The formulas of a whole program."""

    names: tuple[Named, ...]
    proportions: Mapping[str, Expr]  # names that are in fixed proportion to others in this model
    unnamed: tuple[int, ...]  # sizes that appear as numbers
    regions: tuple[RegionFormulas, ...]
    ranks: tuple[RankFormulas, ...]

    def at(self, formula: Expr, **sizes: int) -> int:
        """The value of a formula at the model's own sizes, except for the given ones."""
        given = {named.name: named.value for named in self.names} | sizes
        return int(value_of(formula, given))

    def in_proportion(self, formula: Expr) -> Expr:
        """The formula for models with the same proportions, with fewer names."""
        return formula.subs({each: self.proportions.get(str(each), each) for each in formula.free_symbols})


def formulas(program: Program) -> Formulas:
    """The formulas of a scheduled program."""
    dimensions = Dimensions(program)
    names = SizeNames(dimensions)
    found = _FormulaWriter(program, dimensions, names)
    regions = tuple(found.region(region) for region in program.regions if region.phase == "microbatch")
    saved = {region.name: region.saved_bytes for region in regions}
    ranks = tuple(found.rank(place, saved) for place in range(program.mesh.axis(PIPELINE_AXIS)))
    return Formulas(
        names=names.named(),
        proportions=names.proportions(),
        unnamed=tuple(sorted(names.unnamed)),
        regions=regions,
        ranks=ranks,
    )


class _FormulaWriter:
    def __init__(self, program: Program, dimensions: Dimensions, names: SizeNames) -> None:
        self.program = program
        self.dimensions = dimensions
        self.names = names
        self.held = held_inputs(program)

    def region(self, region: Region) -> RegionFormulas:
        saved = sorted(saved_values(region, self.held[region.name]), key=lambda name: -self._number(region, name))
        graphs = zip(("forward", "backward", "weight gradients"), region.graphs, strict=False)
        return RegionFormulas(
            name=region.name,
            calls=len(self.program.calls_to(region.name)),
            parameters=_total(self._bytes(region, value.name) for value in region.params),
            saved=tuple(NamedBytes(name=name, bytes=self._bytes(region, name)) for name in saved),
            passes=tuple(self._pass(name, region, graph) for name, graph in graphs),
        )

    def rank(self, place: int, saved: Mapping[str, Expr]) -> RankFormulas:
        """The formulas of a rank; `saved` holds the bytes that a call of each region saves."""
        stages = self.program.stages_at(place)
        each: dict[int, Expr] = {stage: _zero() for stage in stages}
        read: dict[str, tuple[str, str]] = {}  # parameters -> a region that reads them, and its name for them
        for call in self.program.calls:
            region = self.program.region(call.region)
            if call.stage in each:
                each[call.stage] += saved.get(call.region, 0)
                values = (value.name for value in region.params)
                read.update((full, (region.name, name)) for full, name in zip(call.params, values, strict=True))
        mixes = microbatches_in_flight(self.program.schedule[place]) if self.program.schedule else ()
        most = [_total(count * each[stage] for stage, count in mix) for mix in mixes]
        here = {item.name: item for item in self.program.parameters if item.name in read}
        kept = {name: self._shard_elements(item, *read[name]) for name, item in here.items()}
        trained = {name: item for name, item in here.items() if item.trainable}
        whole = {name: self.names.elements(*read[name]) for name in trained}
        gradients = _total(
            (kept[name] if self.program.zero >= 2 and item.gather else whole[name]) * ITEMSIZE[item.type.dtype]
            for name, item in trained.items()
        )
        return RankFormulas(
            place=place,
            parameters=_total(kept[name] * ITEMSIZE[item.type.dtype] for name, item in here.items()),
            gradients=gradients,
            optimizer=_total(ADAMW * kept[name] * ITEMSIZE[item.type.dtype] for name, item in trained.items()),
            saved=max(most, key=self.names.number, default=_zero()),
        )

    def _shard_elements(self, parameter: Parameter, region: str, name: str) -> Expr:
        """The part of a parameter that a rank keeps. More axes may cut it than the copy that calls read."""
        read = self.dimensions.types[region, name].layout.sharded_axes
        more = [axis for axis in parameter.type.layout.sharded_axes if axis not in read]
        found = self.names.elements(region, name)
        for axis in more:
            found /= symbol(axis)
        return found

    def _bytes(self, region: Region, name: str) -> Expr:
        return self.names.bytes(region.name, name)

    def _number(self, region: Region, name: str) -> int:
        return self.dimensions.types[region.name, name].local_bytes(self.program.sizes)

    def _pass(self, name: str, region: Region, graph: Graph) -> PassFormulas:
        moved: dict[str, Expr] = {}
        work = _zero()
        for op in _flattened(graph.ops):
            axis = dict(op.attrs).get("axis")
            if op.name in MOVING and isinstance(axis, str):
                moved[axis] = moved.get(axis, _zero()) + self._moved(region, op, axis)
            for product in self.dimensions.work.get((region.name, op.results[0].name), ()) if op.results else ():
                work += self.names.product(product)
        return PassFormulas(name=name, working=self._working(region, graph), moved=moved, flops=work)

    def _moved(self, region: Region, op: Op, axis: str) -> Expr:
        """The bytes that a rank receives: `reshard.cost` without rounding."""
        n = symbol(axis)
        share = self._bytes(region, next(op.refs())) * (n - 1)
        return share if op.name == "all_gather" else (2 if op.name == "all_reduce" else 1) * share / n

    def _working(self, region: Region, graph: Graph) -> Expr:
        """The peak of a pass's temporary values, without its results."""
        memory = memory_of(graph)
        outside = {value.name for value in (*graph.inputs, *region.params)}
        if graph is region.forward:
            outside |= {memory[name] for name in region.saved if name in memory}
        outside |= {memory[name] for name in graph.outputs if name in memory}
        ends: dict[str, int] = {}
        for index, op in enumerate(graph.ops):
            ends.update((memory[name], index) for name in op.refs() if name in memory)
            ends.update((memory[value.name], index) for value in op.results)
        alive: dict[str, int] = {}
        most, worst = 0, frozenset[str]()
        for index, op in enumerate(graph.ops):
            for value in op.results:
                owner = memory[value.name]
                if owner == value.name and owner not in outside:
                    alive[owner] = self._number(region, owner)
            if sum(alive.values()) > most:
                most, worst = sum(alive.values()), frozenset(alive)
            alive = {name: size for name, size in alive.items() if ends[name] > index}
        return _total(self._bytes(region, name) for name in sorted(worst))


def _flattened(ops: Iterable[Op]) -> Iterator[Op]:
    for op in ops:
        yield from op.body or (op,)


def _zero() -> Any:
    from sympy import Integer

    return Integer(0)


def _total(terms: Iterable[Expr]) -> Expr:
    return sum(terms, _zero())
