"""Checks the program after every pass: with the verifier, and its layouts by the rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from partc.errors import InternalError
from partc.ir.layout import Sizes
from partc.ir.mesh import TIME_AXIS
from partc.ir.naming import gradient_owner, is_gradient
from partc.ir.program import Graph, Op, Program, Region, TensorType, Value
from partc.ir.verifier import changed_regions, verify_program
from partc.rules.inference import Inferred, inferred


@dataclass(frozen=True, slots=True)
class Verifier:
    """Verifies the programs of one compilation, pass after pass; unchanged parts are verified once."""

    _held: dict[int, tuple[Op, tuple[TensorType, ...], set[str]]] = field(default_factory=dict)
    _sound: dict[bool, Program] = field(default_factory=dict)  # the last programs without and with local shapes

    def __call__(self, program: Program, facts: frozenset[str], after: str) -> None:
        """Raise InternalError with every fault found, naming the pass."""
        local = "local" in facts
        before = self._sound.get(local)
        verify_program(program, facts, after, before)
        faults = list(self.untrue(program, before)) if local else []
        if faults:
            shown = "\n  ".join(faults[:10])
            raise InternalError(f"{len(faults)} layouts are wrong after {after}:\n  {shown}")
        self._sound[local] = program

    def untrue(self, program: Program, before: Program | None = None) -> Iterator[str]:
        """Values whose layouts do not follow from their operands' layouts, one sentence each.

        Inferred layouts of intermediate values can be doubtful: a local shape of one element hides which dimension is
        cut. Operations on them are skipped, up to the gradients of forward values whose layouts are certain.
        """
        for region in changed_regions(program, before):
            sizes = {**program.sizes, TIME_AXIS: 1} if region.phase == "step" else program.sizes
            for graph in region.graphs:
                yield from self._graph(region, graph, sizes)

    def _graph(self, region: Region, graph: Graph, sizes: Sizes) -> Iterator[str]:
        types = region.types(graph)
        doubtful: set[str] = set()
        hidden: set[str] = set()  # forward values of this graph whose layouts follow from doubtful inferences
        for op in graph.ops:
            operands = tuple(types[name] for name in op.refs())
            if not doubtful.isdisjoint(op.refs()):
                unsure = {value.name for value in op.results}
            else:
                before, read, unsure = self._held.get(id(op), (None, (), set()))
                same = before is op and len(read) == len(operands)
                if not same or any(a is not b for a, b in zip(read, operands, strict=True)):
                    found = inferred(op, types, sizes)
                    faults = [*_faults(op, found, sizes), *_faults_within(op, types, sizes)]
                    yield from (f"{region.name}: {fault}" for fault in faults)
                    if faults:
                        continue
                    unsure = _unsure(op, found)
                    self._held[id(op)] = (op, operands, unsure)
            doubtful.update(
                value.name for value in op.results if value.name in unsure and not _is_given(value, types, hidden)
            )
            if unsure or not hidden.isdisjoint(op.refs()):
                hidden.update(value.name for value in op.results if not is_gradient(value.name))


def _is_given(value: Value, types: Mapping[str, TensorType], hidden: Set[str]) -> bool:
    """Whether the forward pass gives the layout: of the value itself, or of the known value whose gradient it is."""
    name = gradient_owner(value.name)
    if name == value.name:
        return True
    known = types.get(name)
    return known is not None and name not in hidden and value.type.layout in (known.layout, known.layout.dual())


def _unsure(op: Op, found: Sequence[Inferred | None]) -> set[str]:
    """The results whose inferred layouts are doubtful."""
    made = zip(op.results, found, strict=False)
    return {value.name for value, each in made if each is not None and each.doubtful}


def _faults(op: Op, found: Sequence[Inferred | None], sizes: Sizes) -> Iterator[str]:
    for value, made in zip(op.results, found, strict=False):
        if made is not None and not made.allows(value.type.layout, sizes):
            yield f"{value.name} = {op.name} is {value.type}, but its operands imply {made.layout}"


def _faults_within(op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> Iterator[str]:
    """The faults of the operations inside a fused one. Operations on doubtful layouts are skipped."""
    known = {name: types[name] for name in op.refs()}
    doubtful: set[str] = set()
    for step in op.body:
        found = inferred(step, known, sizes)
        if doubtful.isdisjoint(step.refs()):
            yield from _faults(step, found, sizes)
            doubtful |= _unsure(step, found)
        else:
            doubtful.update(value.name for value in step.results)
        known.update((value.name, value.type) for value in step.results)
