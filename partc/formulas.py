"""What calls hold, move and compute, as formulas in the model's sizes and the axes of the mesh.

    block: saved by a call for its backward pass    b·s·h·(34 + 5·a·s/h)/tp

A formula is made of the same tensors as the compiled program, whose dimensions have names in place of numbers: where
the names take the numbers that the model has, it gives the bytes of that program. At other sizes it holds as long as
compiling decides the same there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partc.mesh import PIPELINE_AXIS
from partc.program import ITEMSIZE, MOVING, Graph, Op, Program, Region
from partc.saving import flights, held_inputs, memory_of
from partc.size_names import Named, Names
from partc.symbols import Dimensions

if TYPE_CHECKING:
    from sympy import Expr

ADAMW = 2  # values that the optimizer keeps for each of a parameter's


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Tensors of one name, and their bytes."""

    name: str
    bytes: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A forward or backward pass of one call: bytes that live in it alone, at most; bytes that a rank receives over
    each axis; floating-point operations of its matrix products."""

    name: str
    working: Expr
    moved: Mapping[str, Expr]
    flops: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFormulas:
    """Of one call of a region, on one rank, for one microbatch."""

    name: str
    calls: int
    parameters: Expr  # bytes, as the call reads them
    saved: tuple[Term, ...]
    passes: tuple[Pass, ...]

    @property
    def saved_bytes(self) -> Expr:
        return _total(term.bytes for term in self.saved)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFormulas:
    """Of the ranks at one coordinate on the pipeline axis, in bytes."""

    place: int
    parameters: Expr  # as they are kept: in parts, where ZeRO cuts them
    gradients: Expr
    optimizer: Expr
    saved: Expr  # of all microbatches in flight, when they are most


@dataclass(frozen=True, slots=True, kw_only=True)
class Formulas:
    """Of a whole program."""

    names: tuple[Named, ...]
    proportions: Mapping[str, Expr]  # names that are in fixed proportion to others in this model
    unnamed: tuple[int, ...]  # sizes that stay numbers
    regions: tuple[RegionFormulas, ...]
    ranks: tuple[RankFormulas, ...]

    def at(self, formula: Expr, **sizes: int) -> int:
        """What a formula comes to at the model's own sizes, but for those that are given."""
        given = {named.name: named.value for named in self.names} | sizes
        return int(formula.subs({symbol: given[str(symbol)] for symbol in formula.free_symbols}))

    def in_proportion(self, formula: Expr) -> Expr:
        """The same formula for models of these proportions."""
        return formula.subs({symbol: self.proportions.get(str(symbol), symbol) for symbol in formula.free_symbols})


def formulas(program: Program) -> Formulas:
    """Of a program that has a schedule."""
    dimensions = Dimensions(program)
    names = Names(dimensions)
    found = _Writer(program, dimensions, names)
    regions = tuple(found.region(region) for region in program.regions if region.phase == "microbatch")
    ranks = tuple(found.rank(place) for place in range(program.mesh.axis(PIPELINE_AXIS)))
    return Formulas(
        names=names.named(),
        proportions=names.proportions(),
        unnamed=tuple(sorted(names.unnamed)),
        regions=regions,
        ranks=ranks,
    )


class _Writer:
    def __init__(self, program: Program, dimensions: Dimensions, names: Names) -> None:
        self.program = program
        self.dimensions = dimensions
        self.names = names
        self.held = held_inputs(program)

    def region(self, region: Region) -> RegionFormulas:
        saved = sorted(self._saved(region), key=lambda name: -self._number(region, name))
        graphs = zip(("forward", "backward", "weight gradients"), region.graphs, strict=False)
        return RegionFormulas(
            name=region.name,
            calls=sum(call.region == region.name for call in self.program.calls),
            parameters=_total(self._bytes(region, value.name) for value in region.params),
            saved=tuple(Term(name=name, bytes=self._bytes(region, name)) for name in saved),
            passes=tuple(self._pass(name, region, graph) for name, graph in graphs),
        )

    def rank(self, place: int) -> RankFormulas:
        stages = self.program.stages_at(place)
        regions = {region.name: region for region in self.program.regions}
        each: dict[int, Expr] = {stage: _zero() for stage in stages}
        read: dict[str, tuple[Region, str]] = {}
        for call in self.program.calls:
            region = regions[call.region]
            if call.stage in each:
                if region.phase == "microbatch":
                    each[call.stage] += self._saved_bytes(region)
                values = (value.name for value in region.params)
                read.update((full, (region, name)) for full, name in zip(call.params, values, strict=True))
        mixes = flights(self.program.schedule[place]) if self.program.schedule else ()
        most = [_total(count * each[stage] for stage, count in mix) for mix in mixes]
        kept = {name: self._kept(name, *read[name]) for name in read}
        trained = {item.name: item for item in self.program.parameters if item.trainable and item.name in kept}
        whole = {name: self.names.elements(*_key(read[name])) for name in trained}
        gradients = _total(
            (kept[name] if self.program.zero >= 2 and item.gather else whole[name]) * ITEMSIZE[item.type.dtype]
            for name, item in trained.items()
        )
        types = {item.name: item.type.dtype for item in self.program.parameters}
        return RankFormulas(
            place=place,
            parameters=_total(kept[name] * ITEMSIZE[types[name]] for name in kept),
            gradients=gradients,
            optimizer=_total(ADAMW * kept[name] * ITEMSIZE[types[name]] for name in trained),
            saved=max(most, key=self.names.number, default=_zero()),
        )

    def _kept(self, full: str, region: Region, name: str) -> Expr:
        """How much of a parameter a rank keeps: axes may cut it that don't cut what calls read."""
        from sympy import Symbol

        read = self.dimensions.types[region.name, name].layout.sharded_axes
        more = [axis for axis in self.program.parameter(full).type.layout.sharded_axes if axis not in read]
        found = self.names.elements(region.name, name)
        for axis in more:
            found /= Symbol(axis, positive=True, integer=True)
        return found

    def _saved(self, region: Region) -> list[str]:
        memory = memory_of(region.forward)
        owners = dict.fromkeys(memory[name] for name in region.saved)
        values = region.forward.definitions()
        return [name for name in owners if name not in self.held[region.name] and name in values]

    def _saved_bytes(self, region: Region) -> Expr:
        return _total(self._bytes(region, name) for name in self._saved(region))

    def _bytes(self, region: Region, name: str) -> Expr:
        return self.names.bytes(region.name, name)

    def _number(self, region: Region, name: str) -> int:
        return self.dimensions.types[region.name, name].local_bytes(self.program.sizes)

    def _pass(self, name: str, region: Region, graph: Graph) -> Pass:
        moved: dict[str, Expr] = {}
        work = _zero()
        for op in _all(graph.ops):
            axis = dict(op.attrs).get("axis")
            if op.name in MOVING and isinstance(axis, str):
                moved[axis] = moved.get(axis, _zero()) + self._moved(region, op, axis)
            for product in self.dimensions.work.get((region.name, op.results[0].name), ()) if op.results else ():
                work += self.names.product(product)
        return Pass(name=name, working=self._working(region, graph), moved=moved, flops=work)

    def _moved(self, region: Region, op: Op, axis: str) -> Expr:
        """Bytes that a rank receives: `reshard.cost`, without rounding."""
        from sympy import Symbol

        n = Symbol(axis, positive=True, integer=True)
        share = self._bytes(region, next(op.refs())) * (n - 1)
        return share if op.name == "all_gather" else (2 if op.name == "all_reduce" else 1) * share / n

    def _working(self, region: Region, graph: Graph) -> Expr:
        """The most that is alive at one time of what the pass makes and does not hand on."""
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


def _key(place: tuple[Region, str]) -> tuple[str, str]:
    return place[0].name, place[1]


def _all(ops: Iterable[Op]) -> Iterator[Op]:
    for op in ops:
        yield from op.body or (op,)


def _zero() -> Any:
    from sympy import Integer

    return Integer(0)


def _total(terms: Iterable[Expr]) -> Expr:
    return sum(terms, _zero())
