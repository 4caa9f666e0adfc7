"""Lower bounds on the seconds and bytes of a plan.

The first bound follows from the model alone: every floating-point operation runs on some rank, at the device's peak
at most. The second one takes matrix products as long as their local shapes take, and deals them evenly to pipeline
ranks. The third one plays the calls at their least durations (`tables`), without communication between ranks that the
calls do not contain:

- A pipeline rank computes all its microbatches, after its first one has passed the stages before it; after its last
  one, gradients return through these stages.
- Every microbatch passes all stages forward and backward.
- A rank holds its parameters, gradients and optimizer states, and the values that its microbatches in flight saved.

Communication that these leave out only delays a step, and no memory that they leave out is negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from partc.compilation.plan import ParallelPlan
from partc.cost.flops import model_flops
from partc.cost.saved_tensors import flights
from partc.ir.mesh import BATCH_AXIS, CONTEXT_AXIS, PIPELINE_AXIS
from partc.ir.program import FLOATING, ITEMSIZE, Parameter, Program
from partc.planner.space import sizes_of
from partc.planner.tables import CallTable, Tables
from partc.schedules import SCHEDULES, compute_order, stage_ranks

Cuts = Sequence[tuple[int, int]]

_MOST_FLIGHT = 4  # rounds of a pipeline after which no more microbatches are in flight than before


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """No run of a plan takes fewer seconds, or holds fewer bytes on its fullest rank."""

    seconds: float
    bytes: int


@dataclass
class Bounds:
    """The bounds of plans of one model; `peak` is in flops a second of a rank, `states` in copies of a parameter."""

    annotated: Program  # with shapes of the whole batch
    peak: float
    states: int
    tables: Tables
    resident: Callable[[ParallelPlan, int], int]  # the memory of a process whose tensors hold so many bytes
    _flops: int = field(init=False)
    _bytes: int = field(init=False)
    _flights: dict[tuple[str, int, int, int], tuple[tuple[tuple[tuple[int, int], ...], ...], ...]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self._flops = model_flops(self.annotated)
        tables = set(_tables(self.annotated))
        self._bytes = sum(
            math.prod(item.type.shape) * _item(item)
            for item in self.annotated.parameters
            if item.trainable and item.name not in tables
        )

    def of(self, plan: ParallelPlan) -> Bound:
        """The tightest bound of a plan."""
        return self.tight(plan, self.products(plan, self.simple(plan)))

    def simple(self, plan: ParallelPlan) -> Bound:
        """The bound that follows from flops and parameters alone."""
        sizes = sizes_of(plan)
        ranks = math.prod(sizes.values())
        spread = sizes[BATCH_AXIS] * sizes[CONTEXT_AXIS]
        held = self._bytes // (ranks // spread)
        # Tables may be cut by rows over dp, so that nothing is said here of whole parameters under ZeRO.
        least = self.resident(plan, (2 + self.states) * (held if plan.level == 0 else held // spread))
        return Bound(seconds=self._flops / (ranks * self.peak), bytes=least)

    def products(self, plan: ParallelPlan, known: Bound) -> Bound:
        """The bound from the durations of matrix products, or `known`: pipeline ranks share them evenly at best."""
        seconds = self.tables.products(plan)
        share = plan.microbatches / sizes_of(plan)[PIPELINE_AXIS]
        return known if seconds is None else replace(known, seconds=max(known.seconds, share * seconds))

    def tight(self, plan: ParallelPlan, known: Bound) -> Bound:
        """The tightest bound: that of the calls' own costs, where these are known to hold for the plan, or `known`."""
        kind, ranks = SCHEDULES[plan.schedule], sizes_of(plan)[PIPELINE_AXIS]
        each = plan.virtual_stages or kind.stages_per_rank if ranks > 1 else 1
        table = self.tables.table(plan)
        if table is None:
            return known
        places = stage_ranks(kind, ranks, ranks * each)
        cuts = self.tables.cuts(table, len(places))
        seconds = _seconds(table, cuts, places, plan.microbatches, halves=kind.split_backward)
        return Bound(seconds=max(known.seconds, seconds), bytes=max(known.bytes, self._held(plan, table, cuts, places)))

    def _held(self, plan: ParallelPlan, table: CallTable, cuts: Cuts, places: Sequence[int]) -> int:
        sizes = sizes_of(plan)
        spread, ranks = sizes[BATCH_AXIS] * sizes[CONTEXT_AXIS], sizes[PIPELINE_AXIS]
        size = [0.0] * ranks  # bytes of the parameters of each pipeline rank, cut by tp alone
        for stage, (start, end) in enumerate(cuts):
            size[places[stage]] += table.weights[end] - table.weights[start]
        saved = [table.saved[end] - table.saved[start] for start, end in cuts]
        least = 0
        rows = self._in_flight(plan.schedule, ranks, len(places), plan.microbatches)
        for place in range(ranks):
            flight = max((sum(count * saved[stage] for stage, count in mix) for mix in rows[place]), default=0)
            least = max(least, self.kept(plan, int(size[place]), spread) + int(flight))
        return self.resident(plan, least)

    def kept(self, plan: ParallelPlan, size: int, spread: int) -> int:
        """The bytes of parameters, gradients and states, if parameters that `spread` ranks share have `size` bytes."""
        if plan.level == 0:
            return (2 + self.states) * size
        part = size // spread
        whole = 0
        if plan.level < 3:  # parameters stay whole as computations read them, in 16 bits at least
            whole = size if plan.precision in ("fp32", "fp64") else size // 2
        if plan.level == 1:  # and gradients are summed up whole
            whole += size
        return (2 + self.states) * part + whole

    def _in_flight(
        self, schedule: str, ranks: int, stages: int, microbatches: int
    ) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
        """The sets of microbatches in flight on each pipeline rank; more microbatches have no smaller ones."""
        count = min(microbatches, _MOST_FLIGHT * stages)
        key = schedule, ranks, stages, count
        if key not in self._flights:
            rows = compute_order(SCHEDULES[schedule], ranks, count, stages)
            self._flights[key] = tuple(flights(row) for row in rows)
        return self._flights[key]


def _tables(program: Program) -> Iterator[str]:
    """The parameters whose rows are looked up."""
    for call in program.calls:
        region = program.region(call.region)
        looked_up = {next(op.refs(), "") for op in region.forward.ops if op.name.startswith("embedding")}
        names = zip(region.params, call.params, strict=True)
        yield from (name for value, name in names if value.name in looked_up)


def _item(parameter: Parameter) -> int:
    return ITEMSIZE[parameter.type.dtype] if parameter.type.dtype in FLOATING else 0


def _places(schedule: str, ranks: int, each: int) -> tuple[int, ...]:
    return stage_ranks(SCHEDULES[schedule], ranks, ranks * each)


def _seconds(table: CallTable, cuts: Cuts, places: Sequence[int], microbatches: int, *, halves: bool) -> float:
    """The least makespan of a schedule of these stages."""
    least = table.forward[-1] + table.inputs[-1]
    ahead, work, first = ([0.0] * (max(places) + 1) for _ in range(3))
    for stage, (start, end) in reversed(list(enumerate(cuts))):
        place = places[stage]
        forward = table.forward[end] - table.forward[start]
        ahead[place] += forward + table.inputs[end] - table.inputs[start]
        work[place] += forward + table.backward[end] - table.backward[start]
        first[place] = stage
    for place, stage in enumerate(map(int, first)):
        start, end = cuts[stage]
        fill, drain = table.forward[start], table.inputs[start]
        weights = (table.backward[end] - table.backward[start]) - (table.inputs[end] - table.inputs[start])
        least = max(
            least,
            fill + microbatches * ahead[place] + drain,
            fill + microbatches * work[place] + (0.0 if halves else max(0.0, drain - weights)),
        )
    return least
