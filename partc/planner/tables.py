"""Tables of region costs: seconds and bytes of every call, for one way of cutting weights.

A region's body depends on the axes that cut weights and sequences (tp and cp), on recomputation and on a few options;
the simulator knows which. The sizes of the batch's axes only scale its local shapes, and a cut in space leaves the same
shapes as a cut in time: dp=4 with 2 microbatches as dp=2 with 4. So one program serves all plans that share a body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

from partc.communication.exchanges import graph_of
from partc.compilation.plan import ParallelPlan
from partc.cost.saved_tensors import held_inputs, saved_bytes
from partc.ir.gradients import input_only
from partc.ir.layout import Sizes
from partc.ir.mesh import BATCH_AXIS, Mesh
from partc.ir.program import MOVING, Call, GraphKind, Op, Program, Region, TensorType
from partc.passes.stages import balanced, call_work
from partc.planner.space import sizes_of
from partc.rules import flops, resolve_lowered

Sums = tuple[float, ...]


class OperationRates(Protocol):
    """The simulator's own durations of operations and collectives, in seconds."""

    def operation(self, op: Op, types: Mapping[str, TensorType], sizes: Sizes) -> float: ...

    def collective(self, op: str, mesh: Mesh, axes: Sequence[str], places: Sequence[int], size: int) -> float: ...


@dataclass(frozen=True, slots=True)
class RegionBody:
    """The facts on which bodies of regions depend, apart from the sizes of local batches."""

    key: tuple[object, ...]  # the simulator's
    recompute: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCost:
    """The seconds of a graph's computations, and the collectives that it waits for at once: (op, axis, bytes)."""

    seconds: float = 0.0
    moves: Mapping[tuple[str, str, int], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionCost:
    """The costs of a region's graphs, without and with halves of backward passes, and the bytes that a call saves."""

    forward: GraphCost
    backward: GraphCost
    inputs: GraphCost | None  # None: its backward pass has no halves
    weights: GraphCost
    saved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTable:
    """Lower bounds for the calls that stages share, as sums over the calls before each: [0, first, first two, ...]."""

    work: tuple[float, ...]  # of each call, by which stages are balanced
    forward: Sums  # seconds
    inputs: Sums  # of the half of the backward pass that an earlier stage waits for
    backward: Sums
    saved: Sums  # bytes of a microbatch
    weights: Sums  # bytes of the trained parameters that no earlier call reads, cut over tp alone

    @property
    def calls(self) -> int:
        return len(self.work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """Programs of one body, with whole backward passes and with halves."""

    whole: Program
    halves: Program


class BodySource(Protocol):
    """The source of programs."""

    def shared(self, plan: ParallelPlan) -> tuple[RegionBody, Program] | None:
        """The plan's program before recomputation and stages; None if tables do not hold for the plan."""

    def lowered(self, plan: ParallelPlan, body: RegionBody, program: Program) -> Lowered: ...


@dataclass
class Tables:
    """The costs of calls by body and by sizes of the local batch, made when they are first read."""

    bodies: BodySource
    durations: OperationRates
    _regions: dict[tuple[RegionBody, int], Mapping[str, RegionCost]] = field(default_factory=dict)
    _tables: dict[tuple[RegionBody, int, str], CallTable] = field(default_factory=dict)
    _products: dict[tuple[object, ...], float] = field(default_factory=dict)
    _cuts: dict[tuple[tuple[float, ...], int], tuple[tuple[int, int], ...]] = field(default_factory=dict)
    _moves: dict[tuple[str, str, str, int], float] = field(default_factory=dict)

    def products(self, plan: ParallelPlan) -> float | None:
        """Seconds of all calls' matrix products, forward and backward, of one microbatch, without recomputation.

        None if this is not known to hold for the plan.
        """
        found = self.bodies.shared(plan)
        if found is None:
            return None
        body, program = found
        key = (*body.key, parts_of(plan))
        if key not in self._products:
            each = {region.name: sum(self._product_seconds(program, region)) for region in program.regions}
            self._products[key] = sum(each[call.region] for call in staged_calls(program))
        return self._products[key]

    def _product_seconds(self, program: Program, region: Region) -> Iterator[float]:
        if region.phase == "microbatch":
            for graph in region.graphs:
                types = region.types(graph)
                for op in graph.ops:
                    rule = resolve_lowered(op, types) if op.results else None
                    if rule is not None and flops(op, rule):
                        yield self.durations.operation(op, types, program.sizes)

    def table(self, plan: ParallelPlan) -> CallTable | None:
        """The costs of the calls that stages share, in order; None if they are not known to hold for the plan."""
        found = self.bodies.shared(plan)
        if found is None:
            return None
        body, program = found
        parts = parts_of(plan)
        key = body, parts, plan.mesh
        if key not in self._tables:
            if key[:2] not in self._regions:
                lowered = self.bodies.lowered(plan, body, program)
                sized = (
                    replace(each, mesh=program.mesh, microbatches=program.microbatches)
                    for each in (lowered.whole, lowered.halves)
                )
                self._regions[key[:2]] = dict(self._measured(*sized))
            self._tables[key] = self._table(program, key)
        return self._tables[key]

    def _table(self, program: Program, key: tuple[RegionBody, int, str]) -> CallTable:
        mesh = Mesh.parse(key[2])
        regions = {name: self._costed(cost, mesh) for name, cost in self._regions[key[:2]].items()}
        calls = staged_calls(program)
        costs = [regions[call.region] for call in calls]
        held = {item.name: item.type.local_bytes(program.sizes) for item in program.parameters if item.trainable}
        weights = [sum(held.pop(name, 0) for name in call.params) for call in calls]
        forward, inputs, backward, saved = (tuple(accumulate(each, initial=0)) for each in zip(*costs, strict=True))
        return CallTable(
            work=tuple(call_work(program, calls)),
            forward=forward,
            inputs=inputs,
            backward=backward,
            saved=saved,
            weights=tuple(accumulate(weights, initial=0)),
        )

    def cuts(self, table: CallTable, count: int) -> tuple[tuple[int, int], ...]:
        """The first call of each stage, and the one after its last."""
        key = table.work, count
        if key not in self._cuts:
            self._cuts[key] = balanced(table.work, count)
        return self._cuts[key]

    def _measured(self, whole: Program, halves: Program) -> Iterator[tuple[str, RegionCost]]:
        held = held_inputs(whole)
        for region in whole.regions:
            other = halves.region(region.name)
            yield (
                region.name,
                RegionCost(
                    forward=self._graph(whole, region, "F"),
                    backward=self._graph(whole, region, "B"),
                    inputs=None if other.weight is None else self._graph(halves, other, "I"),
                    weights=self._graph(halves, other, "W"),
                    saved=saved_bytes(region, held[region.name], whole.sizes),
                ),
            )

    def _graph(self, program: Program, region: Region, kind: GraphKind) -> GraphCost:
        graph = graph_of(region, kind)
        if graph is None:
            return GraphCost()
        types, sizes = region.types(graph), program.sizes
        awaited = {next(op.refs()) for op in graph.ops if op.name == "wait"}
        total = 0.0
        moves = Counter[tuple[str, str, int]]()
        for op in graph.ops:
            axis = dict(op.attrs).get("axis")
            if op.name not in MOVING or not isinstance(axis, str):
                total += 0.0 if op.name == "wait" else self.durations.operation(op, types, sizes)
            elif sizes[axis] > 1 and op.results[0].name not in awaited:
                moves[op.name, axis, types[next(op.refs())].local_bytes(sizes)] += 1
        return GraphCost(seconds=total, moves=moves)

    def _costed(self, cost: RegionCost, mesh: Mesh) -> tuple[float, float, float, int]:
        """Seconds forward, of the inputs' half, and backward; bytes saved."""

        def seconds(graph: GraphCost) -> float:
            return graph.seconds + sum(count * self._moving(mesh, *move) for move, count in graph.moves.items())

        backward = seconds(cost.backward)
        inputs = backward if cost.inputs is None else seconds(cost.inputs)
        if cost.inputs is not None:
            backward = min(backward, inputs + seconds(cost.weights))
        return seconds(cost.forward), min(inputs, backward), backward, cost.saved

    def _moving(self, mesh: Mesh, op: str, axis: str, size: int) -> float:
        key = str(mesh), op, axis, size
        if key not in self._moves:
            self._moves[key] = self.durations.collective(op, mesh, (axis,), (), size)
        return self._moves[key]


def staged_calls(program: Program) -> list[Call]:
    """The calls that stages share; those that depend on inputs alone are repeated wherever they are read."""
    pure = input_only(program)
    return [call for call in program.calls if call.name not in pure]


def parts_of(plan: ParallelPlan) -> int:
    """The number of parts of the batch, in space and in time."""
    return sizes_of(plan)[BATCH_AXIS] * plan.microbatches
