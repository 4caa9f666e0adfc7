"""The lines of one function of a region: an assignment for each operation, with comments, sums and deletions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial

from partc.codegen.expressions import (
    accumulates,
    accumulation,
    emitted_type,
    expression,
    is_atom,
    is_chained,
    returns_more,
    unsummed,
    with_accumulation,
)
from partc.codegen.lifetimes import deletions, overwritten
from partc.codegen.names import Names
from partc.codegen.operands import Operands, argument_text, modules
from partc.codegen.partial_gradients import partial_sums, sum_statements
from partc.codegen.recompute_comments import recompute_comments
from partc.codegen.source import Line
from partc.communication import descriptions as collectives
from partc.ir.layout import Sizes
from partc.ir.operations import shares_memory
from partc.ir.program import SCAN, Graph, Op, Ref, Region, Value
from partc.ir.ragged import ragged_rows
from partc.rules import demands_dense

# Operations whose second argument is a shape; True if -1 is allowed for the number of rows.
_SHAPED = {"reshape": True, "expand": True, "slice_backward": False, "select_backward": False}


class BodyWriter:
    """Writes the lines of a graph of a region.

    `buffers` names the gradient buffers to which values are added. `dense` values need no copy where a kernel demands
    dense memory. `prefix` is the module path that the sources of the region's operations share. `scan` writes the call
    of a scan.
    """

    def __init__(
        self,
        region: Region,
        graph: Graph,
        sizes: Sizes,
        names: Names,
        *,
        buffers: Mapping[str, list[str]],
        dense: Collection[str],
        prefix: str,
        scan: Callable[[Op, Operands], str],
    ) -> None:
        self._region, self._sizes, self._names = region, sizes, names
        self._buffers, self._dense, self._prefix, self._scan = buffers, dense, prefix, scan
        self._order = _views_first(graph)
        self._graph = graph
        self._types = region.types(graph)
        self._uses = _use_counts(graph)
        self._params = frozenset(value.name for value in region.params)
        self._started = {name for op in self._order if op.name == "wait" for name in op.refs()}
        self._ragged = ragged_rows(region)
        self._inlined: dict[str, Line] = {}  # values that are written where they are read

    def lines(self, borrowed: Iterable[Value], counted: Mapping[str, str]) -> list[Line]:
        """All lines but the last `return`. The caller frees `borrowed` values.

        `counted` maps a result to the choices of experts that are counted before its operation.
        """
        ordered = replace(self._graph, ops=self._order)
        remade = recompute_comments(ordered, self._region, self._sizes)
        keep = {*self._graph.outputs, *(value.name for value in borrowed)}
        freed = deletions(ordered, keep=keep, sizes=self._sizes)
        bound = {value.name for value in self._graph.inputs}
        gone: list[str] = []
        lines = [line for value in self._graph.inputs for line in self._additions(value)]
        for index, op in enumerate(self._order):
            if op.results[0].name in counted:
                chosen = self._written(counted[op.results[0].name])
                lines.append(Line(code=f"comm.loads.count({chosen})", uses=frozenset({"comm"})))
            following = self._order[index + 1] if index + 1 < len(self._order) else None
            statement = self._statement(op, following, remade.get(op.results[0].name, ""))
            lines.extend(statement)
            if any(line.binds for line in statement):
                bound.update(value.name for value in op.results)
            gone.extend(freed.get(index, ()))
            if statement and gone:
                dead = [self._names[name] for name in gone if name in bound and self._uses.get(name)]
                lines.extend([Line(code=f"del {', '.join(dead)}")] if dead else [])
                gone.clear()
        return lines

    def _written(self, name: str) -> str:
        """The expression of a value."""
        return self._inlined[name].code if name in self._inlined else self._names[name]

    def _additions(self, value: Value) -> list[Line]:
        """The lines that add a value to its gradient buffers."""
        return [
            Line(code=f"{buffer}.add_({self._names[value.name]})", uses=frozenset({"g"}))
            for buffer in self._buffers.get(value.name, ())
        ]

    def _operands(self, op: Op) -> Operands:
        operands = Operands.of(
            op,
            partial(self._dense_if_demanded, op),
            self._types,
            self._sizes,
            shapes=_with_rows(op, self._ragged, self._names),
            started=any(value.name in self._started for value in op.results),
            exclusive=bool(op.args) and isinstance(op.args[0], Ref) and op.args[0].name in self._unshared,
        )
        params = frozenset[str]() if self._params.isdisjoint(op.refs()) else frozenset({"p"})
        operands.used.update(modules((*op.args, *(value for _, value in op.attrs))), params)
        operands.used.update(*(self._inlined[name].uses for name in op.refs() if name in self._inlined))
        return operands

    def _dense_if_demanded(self, op: Op, position: int) -> Callable[[str], str]:
        """The writer of values as an argument: a dense copy if the kernel demands one."""
        if not demands_dense(op, position):
            return self._written
        return lambda name: self._written(name) if name in self._dense else f"{self._written(name)}.contiguous()"

    @cached_property
    def _unshared(self) -> frozenset[str]:
        """Values in memory of their own, each with a single reader."""
        return frozenset(
            value.name
            for op in self._order
            for value in op.results
            if not shares_memory(op, self._types)
            and self._uses.get(value.name) == 1
            and value.name not in self._graph.outputs
        )

    def _statement(self, op: Op, following: Op | None, remade: str) -> list[Line]:
        """The lines of an operation; none if it is written inline in the `following` one.

        `remade` is the comment of an operation that is computed again.
        """
        operands = self._operands(op)
        comment = collectives.comment(op, self._graph, self._types, self._sizes, self._label, apart=operands.started)
        over = [f"written over {argument_text(op.args[place], self._written)}" for place in overwritten(op).values()]
        notes = tuple(filter(None, (remade, comment, *over)))
        if (buffer := self._only_buffer(op)) is not None:
            code = accumulation(buffer, operands)
            return [Line(code=code, layout=str(op.result.type), notes=notes, uses=frozenset(operands.used))]
        code = self._scan(op, operands) if op.name == SCAN else expression(operands)
        into = self._addable_buffers(op)
        if into:
            code = with_accumulation(into, operands)
        apart = partial_sums(op, self._uses, self._graph, self._buffers)
        if apart:
            code = unsummed(operands)
        if not notes and following is not None and self._is_inlined(op, following) and is_atom(code):
            self._inlined[op.result.name] = Line(code=code, uses=frozenset(operands.used))
            return []
        made = [value for value in op.results[: len(op.results) - len(into)] if value.name not in apart]
        targets = [self._names[value.name] if self._is_read(value) else "_" for value in made]
        if len(op.results) == 1 and returns_more(op.name):
            targets.append("*_")
        parts, sums = sum_statements(op, apart, self._buffers, self._names)
        known = {name: str(emitted_type(op, value)) for name, value in zip(targets, made, strict=False) if name != "_"}
        kinds = list(dict.fromkeys(known.values()))
        if len(kinds) > 1:
            notes = (*notes, ", ".join(f"{name}: {type}" for name, type in known.items()))
        layout = "" if len(kinds) != 1 else kinds[0] if len(known) == 1 else f"each {kinds[0]}"
        read = frozenset(operands.used)
        assignment = f"{', '.join((*targets, *parts))} = {code}"
        added = [line for value in made for line in self._additions(value)]
        return [Line(code=assignment, layout=layout, notes=notes, uses=read, binds=True), *added, *sums]

    def _only_buffer(self, op: Op) -> str | None:
        """The gradient buffer that is the only reader of an operation's only result; None if there is none."""
        if len(op.results) != 1:
            return None
        name = op.result.name
        buffers = self._buffers.get(name, ())
        return (
            buffers[0] if len(buffers) == 1 and not self._uses.get(name) and name not in self._graph.outputs else None
        )

    def _is_inlined(self, op: Op, following: Op) -> bool:
        """Whether an operation's only reader is the next operation, and reads it as the first operand or as a weight's
        transpose.
        """
        if len(op.results) != 1 or returns_more(op.name):
            return False
        name = op.result.name
        if self._uses.get(name) != 1 or name in self._graph.outputs or name in self._buffers:
            return False
        transposed = op.name == "permute" and isinstance(op.args[0], Ref) and op.args[0].name in self._params
        if transposed and name in following.refs():
            return True
        return is_chained(following.name) and following.args[0] == Ref(name)

    def _addable_buffers(self, op: Op) -> list[str]:
        """The buffers to which the operation itself can add all results but the first; empty if it cannot."""
        more = [value.name for value in op.results[1:]] if accumulates(op.name) else []
        alone = all(len(self._buffers.get(name, ())) == 1 and not self._uses.get(name, 0) for name in more)
        addable = alone and not {*more} & {*self._graph.outputs}
        return [self._buffers[name][0] for name in more] if addable else []

    def _is_read(self, value: Value) -> bool:
        return bool(self._uses.get(value.name)) or value.name in self._graph.outputs or value.name in self._buffers

    def _label(self, op: Op) -> str:
        """A label for an operation: its module, relative to the region, else its line in the model file."""
        inner = next((each for each in (op, *op.body) if each.source), op)
        module = inner.module.removeprefix(self._prefix).strip(".")
        if module or not inner.source:
            return module or inner.results[0].name
        return self._prefix if inner.module else f"{inner.source.file.rpartition('/')[2]}:{inner.source.line}"


def _with_rows(op: Op, ragged: frozenset[str], names: Names) -> dict[int, tuple[str, ...]]:
    """For an operation on a data-dependent number of rows: its shape arguments as source, by position."""
    if ragged.isdisjoint(value.name for value in op.results):
        return {}
    shape = op.args[1] if len(op.args) > 1 and op.name in _SHAPED else ()
    if not isinstance(shape, tuple) or not shape:
        return {}
    rows = "-1" if _SHAPED[op.name] else f"{names[next(name for name in op.refs() if name in ragged)]}.shape[0]"
    return {1: (rows, *map(str, shape[1:]))}


def _use_counts(graph: Graph) -> dict[str, int]:
    counts: dict[str, int] = {}
    for op in graph.ops:
        for name in op.refs():
            counts[name] = counts.get(name, 0) + 1
    return counts


def _views_first(graph: Graph) -> tuple[Op, ...]:
    """The graph in which a view that is its operand's only reader directly follows the operand's operation."""
    uses = _use_counts(graph)
    made = {value.name: op for op in graph.ops for value in op.results if len(op.results) == 1}
    follower: dict[int, Op] = {}
    moved: set[int] = set()
    for op in graph.ops:
        if not is_chained(op.name) or not isinstance(op.args[0], Ref) or sum(1 for _ in op.refs()) != 1:
            continue
        maker = made.get(op.args[0].name)
        if maker is not None and uses[op.args[0].name] == 1 and op.args[0].name not in graph.outputs:
            follower[id(maker)] = op
            moved.add(id(op))
    order: list[Op] = []
    for op in graph.ops:
        following: Op | None = op if id(op) not in moved else None
        while following is not None:
            order.append(following)
            following = follower.get(id(following))
    return tuple(order)
