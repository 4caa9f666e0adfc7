"""Read a 16-bit value itself, where an fp32 copy of it is only rounded back to 16 bits.

    grad_out = to(grad_out_bf16, <f32>)           # f32[8, 4, 8]
    grad_x_1 = to(grad_out, <bf16>)               # bf16[8, 4, 8]
    grad_x_3 = add(grad_x_1, grad_x_2)            # bf16[8, 4, 8]
  ->
    grad_out = to(grad_out_bf16, <f32>)           # f32[8, 4, 8]
    grad_x_3 = add(grad_out_bf16, grad_x_2)       # bf16[8, 4, 8]

Views between the two casts are taken of the 16-bit value; a copy that nothing else reads is dropped. Such pairs arise
in backward passes of sums that mixed precision computes in fp32. Rounding a number that has 16 bits to 16 bits does not
change it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from partc import fuel
from partc.ir.naming import unique
from partc.ir.operations import VIEWS
from partc.ir.program import Graph, Op, Program, Region, TensorType, Value, needed


def narrow(program: Program) -> Program:
    """Rewrite all graphs of all regions."""
    return program.mapped(_graph)


def _graph(region: Region, graph: Graph) -> Graph:
    kept = region.read_outside(graph)
    work = _Narrowed(region.types(graph), graph.makers(), kept)
    ops = tuple(step for op in graph.ops for step in work.steps(op))
    if not work.removable:
        return graph
    return replace(graph, ops=needed(ops, kept, removable=lambda op: op.results[0].name in work.removable))


@dataclass(slots=True)
class _Narrowed:
    """The operations of a graph, one after another, with 16-bit values in place of their copies."""

    types: Mapping[str, TensorType]
    makers: Mapping[str, Op]
    kept: Collection[str]
    instead: dict[str, str] = field(default_factory=dict)  # a value -> the equal value that is read in its place
    removable: set[str] = field(default_factory=set)  # the copies, which may have no reader any more
    taken: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.taken = {*self.types}

    def steps(self, op: Op) -> Iterator[Op]:
        """The operation, or views of the 16-bit value in its place."""
        cast, *views = self._path(op) or (None,)
        named = not views and op.results[0].name in self.kept  # others read the result by its name
        if cast is None or named or not fuel.may_rewrite("narrow", op.source):
            yield op.renamed(self.instead)
            return
        self.removable |= {step.result.name for step in (cast, *views)}
        (name,) = cast.renamed(self.instead).refs()
        if not views:
            self.instead[op.result.name] = name
            return
        for view in views[:-1]:
            type = replace(view.result.type, dtype=op.result.type.dtype)
            result = Value(name=unique(f"{view.result.name}_narrow", self.taken), type=type)
            yield replace(view.reading((name,)), results=(result,))
            name = result.name
        yield replace(views[-1].reading((name,)), results=op.results)

    def _path(self, op: Op) -> tuple[Op, ...]:
        """The cast to fp32 and the views after it, if the operation rounds their result back."""
        if op.name != "to" or op.result.type.dtype not in ("bf16", "f16"):
            return ()
        found: list[Op] = []
        name = next(op.refs())
        while (maker := self.makers.get(name)) is not None and len(maker.results) == 1:
            found.append(maker)
            operands = [*maker.refs()]
            if maker.name == "to":
                before, after = self.types[operands[0]], maker.result.type
                exact = before.dtype == op.result.type.dtype and after.dtype == "f32" and before.layout == after.layout
                return tuple(reversed(found)) if exact else ()
            if maker.name not in VIEWS or len(operands) != 1 or maker.result.type.dtype != "f32":
                return ()
            name = operands[0]
        return ()
