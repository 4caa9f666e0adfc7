"""Run independent operations while a collective is in progress.

    grad_down.bias   = sum(grad_out, (0, 1), False)
    grad_down_…_t    = permute(grad_out, (1, 0, 2))
    grad_down_…_full = all_gather(grad_down_…_t, dim=0, outer=1, axis="tp")
    grad_gelu        = linear_grad_input(grad_down_…_full, down.weight)
  ->
    grad_down_…_t         = permute(grad_out, (1, 0, 2))
    grad_down_…_full_work = all_gather(grad_down_…_t, dim=0, outer=1, axis="tp")
    grad_down.bias        = sum(grad_out, (0, 1), False)
    grad_down_…_full      = wait(grad_down_…_full_work)
    grad_gelu             = linear_grad_input(grad_down_…_full, down.weight)

At its place a collective only starts; a `wait` ends it. Earlier operations that the collective does not need
(mostly gradients of weights) move behind its start, and later ones move before its wait. Together they take no longer
than the collective, since postponed operations keep their operands in memory. An operation may move past other
collectives, unless one of them needs it to hide. Times are those of a named machine (cost.roofline). Collectives keep
their order. A collective without independent operations stays as it is. Small sums that do not need each other are
joined first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from partc import fuel
from partc.cost.roofline import seconds
from partc.ir.collectives import MOVING
from partc.ir.layout import Sizes
from partc.ir.naming import unique
from partc.ir.program import Graph, Op, Program, Ref, Region
from partc.passes.overlap.joined import with_joined_sums


def overlap(program: Program) -> Program:
    """Move collectives and their waits apart, in every graph of every region."""
    return program.mapped(lambda region, graph: _graph(region, graph, program.sizes))


def _graph(region: Region, graph: Graph, sizes: Sizes) -> Graph:
    if not _moving(graph, sizes):
        return graph
    graph = with_joined_sums(graph, {value.name: value.type for value in region.params}, sizes)
    types = region.types(graph)
    line = _Line(list(graph.ops), {id(op): seconds(op, types, sizes) for op in graph.ops}, _needs(graph))
    taken = {*types}
    for op in _moving(graph, sizes):
        wait = line.hidden(op) if fuel.may_rewrite("overlap", op.source) else None
        if wait is None:
            continue
        work = replace(op.result, name=unique(f"{op.result.name}_work", taken))
        line.ops[line.at(op)] = replace(op, results=(work,))
        line.ops.insert(wait, Op(name="wait", args=(Ref(work.name),), results=op.results, source=op.source))
    return replace(graph, ops=tuple(line.ops))


def _moving(graph: Graph, sizes: Sizes) -> list[Op]:
    return [op for op in graph.ops if op.name in MOVING and sizes[str(dict(op.attrs)["axis"])] > 1]


def _needs(graph: Graph) -> dict[int, int]:
    """For each operation, by identity: the operations on which it depends, and itself, as bits."""
    made: dict[str, int] = {}
    found: dict[int, int] = {}
    for number, op in enumerate(graph.ops):
        bits = 1 << number
        for name in op.refs():
            bits |= made.get(name, 0)
        found[id(op)] = bits
        made.update((value.name, bits) for value in op.results)
    return found


@dataclass(slots=True)
class _Line:
    """The operations in their new order, and the time of each.

    Sets of operations are bits of an integer. The search for operations to postpone ends where no candidate is left.
    Without this, every collective would search all operations before it.
    """

    ops: list[Op]
    times: Mapping[int, float]
    needs: Mapping[int, int]
    place: int = 0  # the index of the last collective
    before: int = 0  # operations that take time and precede it
    fixed: int = 0  # operations that stay before it, and all that they depend on

    def at(self, op: Op) -> int:
        """The index of a collective. None that comes before the last one is asked for."""
        return next(index for index in range(self.place, len(self.ops)) if self.ops[index] is op)

    def bits(self, ops: Iterable[Op]) -> int:
        """The bits of the operations that take time."""
        return sum(1 << self.needs[id(op)].bit_length() - 1 for op in ops if self._time(op))

    def go_to(self, place: int) -> None:
        """Go on to the next collective. Operations that take no time, and those that hide a collective, are fixed."""
        for index in range(self.place, place):
            op = self.ops[index]
            if op.name == "wait":
                (work,) = op.refs()
                for hiding in reversed(self.ops[:index]):
                    if any(value.name == work for value in hiding.results):
                        break
                    self.fixed |= self.needs.get(id(hiding), 0)
            elif self._time(op):
                self.before |= self.bits((op,))
            else:
                self.fixed |= self.needs.get(id(op), 0)
        self.place = place

    def hidden(self, op: Op) -> int | None:
        """Move operations between a collective and its first reader; returns the reader's index, or None if nothing
        moves.
        """
        left = self._delayed(op)
        start = self.place
        reader = self._reader(start, op.result.name)
        if left > 0:
            between = sum(map(self._time, self.ops[start + 1 : reader]))
            reader += self._brought_forward(reader, op.result.name, self.times[id(op)] - between)
        return reader if any(map(self._time, self.ops[start + 1 : reader])) else None

    def _time(self, op: Op) -> float:
        """The seconds that an operation computes: 0 for collectives and waits."""
        return 0.0 if op.name in MOVING else self.times.get(id(op), 0.0)

    def _delayed(self, op: Op) -> float:
        """Move earlier operations that a collective does not need behind it, until they hide it.

        Operations that hide another collective stay. Returns the seconds of the collective that are not hidden.
        """
        left, place = self.times[id(op)], self.at(op)
        self.go_to(place)
        self.fixed |= self.needs[id(op)]
        free = self.before & ~self.fixed
        needed = {*op.refs()}
        under_way: set[str] = set()  # in progress at this position, until a later wait
        chosen: list[int] = []
        for index in range(place - 1, -1, -1):
            before = self.ops[index]
            if left <= 0 or not free:
                break
            free &= ~self.bits((before,))
            if before.name == "wait":
                under_way.update(before.refs())
            under_way.difference_update(value.name for value in before.results)
            if not under_way and self._time(before) and needed.isdisjoint(value.name for value in before.results):
                chosen.append(index)
                left -= self._time(before)
            else:
                needed.update(before.refs())
        moved = [self.ops[index] for index in reversed(chosen)]
        self.ops[place + 1 : place + 1] = moved
        for index in chosen:
            del self.ops[index]
        self.before &= ~self.bits(moved)
        self.place = place - len(chosen)
        return left

    def _reader(self, start: int, name: str) -> int:
        readers = (index for index in range(start + 1, len(self.ops)) if name in self.ops[index].refs())
        return next(readers, len(self.ops))

    def _brought_forward(self, reader: int, name: str, left: float) -> int:
        """Move later operations that don't depend on `name` in front of its reader; returns their number."""
        late = {name}
        chosen: list[int] = []
        needed: list[int] = []  # views, which take no time; they move if a chosen operation reads them
        for index in range(reader, len(self.ops)):
            op = self.ops[index]
            if op.name in MOVING or op.name == "wait" or not late.isdisjoint(op.refs()):
                late.update(value.name for value in op.results)
            elif self._time(op):
                chosen.extend((*needed, index))
                needed.clear()
                left -= self._time(op)
                if left <= 0:
                    break
            else:
                needed.append(index)
        moved = [self.ops[index] for index in chosen]
        for index in reversed(chosen):
            del self.ops[index]
        self.ops[reader:reader] = moved
        return len(moved)
