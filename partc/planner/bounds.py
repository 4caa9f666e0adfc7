"""Lower bounds on the seconds and bytes of a plan.

The first bound follows from the model alone: every floating-point operation runs on some rank, at most at the device's
peak, and the ranks of a stage together hold the largest matrix product. The second one adds up the calls of each rank's
whole batch, and the filling of the pipeline, as if every wave of tiles were full. Parts of the batch take no less than
their share of this, so that one table serves all numbers of microbatches. The other bounds add up the simulator's time
for each call (`tables`), in closed form or along the schedule:

- A pipeline rank computes all its microbatches, after its first one has passed the stages before it; after its last
  one, gradients return through these stages.
- Collectives over the batch's axes follow each other. Concurrent computation is slower, by the rates' slowdown.
- The sums of gradients start in the last backward pass of a stage. At the end parameters are updated. Under ZeRO 1 and
  2 they are gathered as the next step begins: during the gathers over some axes, a rank runs at most one forward pass.
- A rank holds its parameters, gradients and optimizer states, and the values that its microbatches in flight saved,
  besides those inside the largest call.

For plans whose stages are not fitted yet, only the first two bounds exist. They assume the quickest stages and the
quickest ways of recomputing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations, pairwise
from typing import Any, TypeVar

import numpy as np

from partc.compilation.plan import ParallelPlan
from partc.cost.flops import ProductWork, StepWork, model_work
from partc.cost.forecast import UPDATE
from partc.cost.saved_tensors import microbatches_in_flight
from partc.ir.mesh import BATCH_AXIS, PIPELINE_AXIS, TENSOR_AXIS, Mesh
from partc.ir.program import Call, Program
from partc.passes.stages import staged_calls
from partc.planner.model_sizes import (
    expert_parameters,
    floating_bytes,
    largest_product,
    looked_up_parameters,
    matrix_products,
)
from partc.planner.space import FITTED, MIXED, Family, expert_parts, inner_axes, mesh_of, sizes_of, stages_of
from partc.planner.stage_fitting import StageNeeds, cuttable, fit, fit_ways, fits, range_sums, slowest
from partc.planner.stage_times import Cuts, Stages, TimedStages, Work
from partc.planner.tables import CallTable, ShareTable, Tables
from partc.planner.use_fitting import HIDDEN, UseNeeds, fit_uses
from partc.schedules import SCHEDULES, compute_order, stage_ranks
from partc.schedules.per_stage import expanded, shortened, stage_kinds
from partc.sharding.uses import BatchUse, uses_text

# The microbatches that a rank has in flight at the same time, as (stage, number of microbatches).
InFlight = tuple[tuple[int, int], ...]
_Table = TypeVar("_Table")

_LEAST = 1 - 1e-6  # margin for seconds that are added up from rounded numbers of bytes
_PAIRED = 8  # the most calls among which pairs, too, get the other use
_FITS = 3  # the most attempts to fit uses, each to less memory
_MOST_FLIGHT = 4  # rounds of a pipeline after which the microbatches in flight no longer increase


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A lower bound of a plan: the seconds of its step, and the bytes on its fullest rank."""

    seconds: float
    bytes: int


@dataclass
class Bounds:
    """The bounds of plans of one model. `peak` is in flops per second and rank; `states` counts copies of a
    parameter.
    """

    annotated: Program  # with shapes of the whole batch
    peak: float
    least: Callable[[ProductWork], float]  # the seconds in which one rank does some work, at the highest rates
    states: int
    tables: Tables
    filled_tiles: Tables  # with rates at which a part of a batch takes no less than its share of the whole batch's time
    linkless: Tables  # the same, where collectives take no time
    resident: Callable[[ParallelPlan, int], int]  # the memory of a process, given the bytes of its tensors
    _products: StepWork = field(init=False)
    _calls: int = field(init=False)
    _bytes: int = field(init=False)  # of trained parameters besides experts
    _experts: int = field(init=False)
    _product: int = field(init=False)  # bytes of the largest result of a matrix product
    # The calls that compute the loss's logits, in chunks if the plan says so -> their flops.
    _losses: dict[int, int] = field(init=False)
    _flights: dict[tuple[str, int, int, int], Sequence[Sequence[InFlight]]] = field(default_factory=dict)
    _computed: dict[tuple[bool, bool], float] = field(default_factory=dict)
    _bytes_of: dict[tuple[object, ...], int] = field(default_factory=dict)
    _works: dict[tuple[object, ...], Work | None] = field(default_factory=dict)
    _separate: dict[tuple[object, ...], bool] = field(default_factory=dict)
    _least: dict[tuple[object, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._products = model_work(self.annotated)
        calls = staged_calls(self.annotated)[0]
        self._calls = len(calls)
        tables, experts = set(looked_up_parameters(self.annotated)), set(expert_parameters(self.annotated))
        sizes = {
            item.name: floating_bytes(item.type)
            for item in self.annotated.parameters
            if item.trainable and item.name not in tables
        }
        self._experts = sum(size for name, size in sizes.items() if name in experts)
        self._bytes = sum(sizes.values()) - self._experts
        self._product = largest_product(self.annotated)
        largest = {
            region.name: flops
            for region in self.annotated.regions
            for size, flops in matrix_products(region)
            if size == self._product
        }
        self._losses = {index: largest[call.region] for index, call in enumerate(calls) if call.region in largest}

    def of(self, plan: ParallelPlan) -> Bound:
        """The tightest bound of a plan."""
        return self.scheduled(plan, self.summed(plan, self.filled(plan, self.wide(plan, self.simple(plan)))))

    def simple(self, plan: ParallelPlan) -> Bound:
        """The bound that follows from flops, parameters and the largest product alone.

        If stages are finer than the calls, full recomputation adds nothing to this bound.
        """
        again = plan.recompute == "full" and stages_of(plan) <= self._calls
        seconds = self.computed(again=again, in_chunks=plan.loss_chunks > 1) / math.prod(sizes_of(plan).values())
        return Bound(seconds=seconds, bytes=self._least_bytes(plan, plan.microbatches))

    def _least_bytes(self, plan: ParallelPlan, microbatches: int) -> int:
        """The bytes of a plan's parameters and of the largest product, with another number of microbatches."""
        sizes = sizes_of(plan)
        ranks = math.prod(sizes.values())
        if plan.level == 0:
            stage = self._bytes // sizes[TENSOR_AXIS] + self._experts // expert_parts(plan)
            held = stage // sizes[PIPELINE_AXIS]
        else:  # tables may be cut by rows over dp: whole parameters under ZeRO do not count here
            copies = sizes[BATCH_AXIS] // plan.span if plan.span else 1
            held = (self._bytes + self._experts) * copies // ranks
        product = self._product * sizes[PIPELINE_AXIS] // (ranks * microbatches * plan.loss_chunks)
        return self.resident(plan, max((2 + self.states) * held, product))

    def computed(self, *, again: bool = False, in_chunks: bool = False) -> float:
        """The least seconds in which one rank computes all products of a step.

        With `again`, full recomputation's products count too. With `in_chunks`, the time to write results is left out.
        """
        key = again, in_chunks
        if key not in self._computed:
            step = self._products
            work = step.once.plus(step.again) if again else step.once
            self._computed[key] = self.least(replace(work, results=0) if in_chunks else work)
        return self._computed[key]

    def known(self, plan: ParallelPlan) -> bool:
        """Whether the tables hold for a plan."""
        return self.tables.room(_uniform_stages(plan)) is not None

    def fitted(self, plan: ParallelPlan, limit: int) -> ParallelPlan | None:
        """The plan with fitted stages, on ranks that hold at most `limit` bytes. None if no stages fit, or if the
        fitted stages are balanced and recompute alike, which is another plan of the space.
        """
        if plan.stage_calls != FITTED:
            return plan
        ways = plan.recompute.split("|")
        even = [_uniform_stages(plan, way) for way in ways]
        shares, rooms = self.tables.shares(even[0]), [*map(self.tables.room, even)]
        if shares is None or None in rooms:
            return None
        stages = self._stages(even[0])
        needs = StageNeeds(
            held=np.array(shares.held, dtype=np.float64),
            saved=np.array([each.saved for each in rooms if each is not None], dtype=np.float64),
            inside=np.stack([stages.inside_calls(each, shares) for each in rooms if each is not None]),
            cuts=stages.cuts,
            at=stages.at,
            rows=self._in_flight(plan.schedule, stages.ranks, len(stages.places), plan.microbatches),
            room=self._room(plan, limit),
        )
        several, places = len(stages.places) > stages.ranks, self.tables.places(even[0])
        allowed: Any = needs.allowed_ways() if several else needs.allowed()
        if not (allowed.any(axis=0).all() if several else fits(allowed, places)):
            return None
        calls = [*map(self.tables.calls, even)]
        if None in calls:
            return None
        seconds = np.stack([self._step(stages, each, shares) for each in calls if each is not None])
        found: Sequence[tuple[int, int]] | None
        if several:
            starts, ends = np.array(stages.cuts).T
            best = fit_ways(seconds[:, ends] - seconds[:, starts], allowed)
            found = None if best is None else [*zip(ends.tolist(), best, strict=True)]
        else:
            found = fit(cuttable(range_sums(seconds), places), allowed)
        if found is None:
            return None
        ends, chosen = [end for end, _ in found], [ways[way] for _, way in found]
        balanced, alike = ends == [end for _, end in stages.cuts], len(set(chosen)) == 1
        if balanced and alike:
            return None
        numbers = shortened((end - start for start, end in pairwise((0, *ends))), ",")
        kinds = chosen[0] if alike else shortened(chosen, "/")
        return replace(plan, stage_calls=None if balanced else numbers, recompute=kinds)

    def _room(self, plan: ParallelPlan, limit: int) -> int:
        """The most bytes of tensors on a rank whose process has `limit` bytes."""
        return bisect_right(range(limit + 1), limit, key=lambda tensors: self.resident(plan, tensors)) - 1

    def mixed(self, plan: ParallelPlan, limit: int) -> ParallelPlan | None:
        """The plan with fitted uses of tp, on ranks that hold at most `limit` bytes; None if no mix of uses fits, or if
        tp should have the same use in all calls, which is another plan of the space.
        """
        room = self._room(plan, limit)
        for _ in range(_FITS):
            needs = self._use_needs(plan, room)
            found = None if needs is None else fit_uses(needs)
            if found is None:
                return None
            chosen = self._with_uses(plan, found)
            excess = self._filled(chosen) - limit
            if excess <= 0:
                return chosen
            room -= excess
        return None

    def _with_uses(self, plan: ParallelPlan, uses: Sequence[int]) -> ParallelPlan:
        """The plan in which tp cuts the batch of the calls whose use is 1."""
        names = [call.name for call in self._unmixed(plan)]
        over = [name for name, use in zip(names, uses, strict=True) if use]
        return replace(plan, batch_over=uses_text(TENSOR_AXIS, over, names) if over else None)

    def _unmixed(self, plan: ParallelPlan) -> Sequence[Call]:
        """The calls of the plan that stages share, without those that change layouts between uses."""
        return staged_calls(self.tables.program(_used(_uniform_stages(plan), False)))[0]

    def turned(self, plan: ParallelPlan) -> Iterator[ParallelPlan]:
        """The plans in which one call gets the other use of tp: the first or last of equal calls with the same use. If
        there are few, also those in which two calls do.
        """
        if not self.known(_used(plan, False)):
            return
        calls, over = self._unmixed(plan), BatchUse.parse(plan.batch_over or "", mesh_of(plan))
        uses = [int(any(use.matched(call.name) for use in over)) for call in calls]
        kinds = [(call.region, use) for call, use in zip(calls, uses, strict=True)]
        edges = [i for i, kind in enumerate(kinds) if any(other != kind for other in kinds[max(0, i - 1) : i + 2])]
        pairs = combinations(edges, 2) if len(edges) <= _PAIRED else ()
        for places in (*((edge,) for edge in edges), *pairs):
            turned = [use ^ (place in places) for place, use in enumerate(uses)]
            if not all(turned):
                yield self._with_uses(plan, turned)

    def _use_needs(self, plan: ParallelPlan, room: int) -> UseNeeds | None:
        each = []
        for way in (_used(plan, False), _used(plan, True)):
            calls, shares, own = self.tables.calls(way), self.tables.shares(way), self.tables.room(way)
            if room <= 0 or calls is None or shares is None or own is None:
                return None
            each.append((way, calls, shares, own))
        if len(each[0][1].forward) != len(each[1][1].forward):
            return None
        stages, crossing = self._stages(each[0][0]), each[1][1].crossing
        rows = self._in_flight(plan.schedule, stages.ranks, len(stages.places), plan.microbatches)
        ranges = [range(start, end) for start, end in stages.cuts]
        return UseNeeds(
            seconds=np.stack([np.diff(self._step(stages, known, share)) for _, known, share, _ in each]),
            moved=np.stack([self._moved(way, share) for way, _, share, _ in each]),
            changes=2 * plan.microbatches * np.array([self._changed(plan, size) for size in crossing[:-1]]),
            held=np.stack([np.diff(share.held) for _, _, share, _ in each]),
            saved=np.stack([np.diff(own.saved) for _, _, _, own in each]),
            inside=np.stack([stages.inside_calls(own, share) for _, _, share, own in each]),
            names=each[0][3].names,
            ranks=[[call for stage in at for call in ranges[stage]] for at in stages.at],
            flights=[
                [{call: count for stage, count in mix for call in ranges[stage]} for mix in mixes] for mixes in rows
            ],
            room=room,
            hidden=HIDDEN if plan.batch_over == MIXED[0] else 0.0,
        )

    def _changed(self, plan: ParallelPlan, size: int) -> float:
        """The seconds in which a value of `size` bytes on each rank changes the dimension that tp cuts."""
        return self.tables.collective(plan, "all_to_all", (TENSOR_AXIS,), size) if size else 0.0

    def _moved(self, plan: ParallelPlan, shares: ShareTable) -> Any:
        """The seconds of the collectives of each call's parameters and gradients, as if none overlapped."""
        found = np.zeros(len(shares.held) - 1)
        for sums in shares.refreshed.values():
            found = found + np.diff(sums)
        for sums in (*shares.gathers.values(), *shares.scatters.values()):
            found = found + plan.microbatches * np.diff(sums)
        for (op, axes), sums in shares.sums.items():
            sizes = np.diff(sums).astype(int).tolist()
            found = found + np.array([self.tables.collective(plan, op, axes, size) if size else 0.0 for size in sizes])
        return found

    def _step(self, stages: Stages, calls: CallTable, shares: ShareTable) -> Any:
        """The seconds of a step without waits, as sums over the calls before each call."""
        backward = np.add(calls.inputs, calls.weights) if stages.halved else calls.backward
        update = self.tables.rates.streamed(UPDATE * shares.updated[-1]) / (shares.updated[-1] or 1)
        return stages.plan.microbatches * np.add(calls.forward, backward) + update * np.array(shares.updated)

    def of_family(self, family: Family, known: Bound, limit: float = math.inf) -> Bound:
        """The bound of all plans of a family that hold at most `limit` bytes, at least `known`."""
        return replace(known, seconds=max(known.seconds, min(map(self._wide, self._ways(family, limit)), default=0.0)))

    def _ways(self, family: Family, limit: float) -> Iterator[ParallelPlan]:
        """The plans without ZeRO, for the numbers of microbatches with which some plan may hold at most `limit`
        bytes.
        """
        least = family.least
        fits = (count for count in family.microbatches if self._least_bytes(least, count) <= limit)
        return replace(family, microbatches=tuple(fits)).ways()

    def of_all_orders(self, family: Family, known: Bound, limit: float = math.inf) -> Bound:
        """The bound of the families that differ in the place of pp and dp among their axes alone, as if collectives
        took no time. Layouts depend on the order of the others, and so do the ranks that several axes give to experts.
        """
        base = family.base
        if "," not in (base.experts or ""):
            outside = {PIPELINE_AXIS: 0, BATCH_AXIS: 1}
            axes = sorted(Mesh.parse(base.mesh).axes, key=lambda axis: outside.get(axis[0], 2))
            base = replace(base, mesh=str(Mesh(axes=tuple(axes))))
        ways = self._ways(replace(family, base=base), limit)
        least = min((self._wide(way, self.linkless) for way in ways), default=0.0)
        return replace(known, seconds=max(known.seconds, least))

    def wide(self, plan: ParallelPlan, known: Bound) -> Bound:
        """The bound from a whole batch without microbatches, and the pipeline's filling, at least `known`."""
        return replace(known, seconds=max(known.seconds, self._wide(plan)))

    def _wide(self, plan: ParallelPlan, tables: Tables | None = None) -> float:
        """The seconds of the slowest rank; 0 if they are not known.

        The rank waits until the first microbatch has passed the earlier stages; after its last one, gradients return
        through these stages.
        """
        tables = tables or self.filled_tiles
        if plan.batch_over in MIXED:  # calls of different uses may leave collectives to each other
            tables = self.linkless
        key = tables is self.linkless, plan.mesh, plan.experts, plan.batch_over, plan.recompute, plan.loss_chunks
        way = *key, plan.stage_calls, plan.schedule, plan.virtual_stages, plan.microbatches
        if way not in self._least:
            self._least[way] = _LEAST * self._slowest(plan, tables, key)
        return self._least[way]

    def _slowest(self, plan: ParallelPlan, tables: Tables, key: tuple[object, ...]) -> float:
        if plan.stage_calls not in (None, FITTED) or plan.batch_over not in (None, *MIXED):
            return 0.0
        work = self._local_work(plan, tables, key)
        if work is None:
            return 0.0
        stages = self._stages(plan, work.plan)
        if plan.stage_calls is None or len(stages.places) > stages.ranks:
            return work.seconds(stages, plan.microbatches)
        alone = cuttable(work.alone(plan.microbatches, halved=stages.halved), self.tables.places(work.plan))
        return slowest([alone] * stages.ranks)

    def _local_work(self, plan: ParallelPlan, tables: Tables, key: tuple[object, ...]) -> Work | None:
        """The work of a rank's whole local batch as one microbatch, without lookups; None if it is not known.

        Of several ways of recomputing, each call takes the quickest; full recomputation repeats everything that the
        others repeat. Of losses in chunks, only the products for logits count. Microbatches that are separate batches
        have layouts of their own: the whole batch counts without collectives.
        """
        bodies = self.tables.bodies
        several = plan.microbatches > 1, *key
        if several not in self._separate:  # whether microbatches are separate does not depend on their number
            unmixed = _used(plan, False) if plan.batch_over in MIXED else plan  # uses are not fitted yet
            self._separate[several] = bodies.separate_batches(_uniform_stages(unmixed))
        key = several if bodies.everywhere else (plan.microbatches, *key)
        if self._separate[several]:
            plan, tables = replace(plan, microbatches=1), self.linkless
        if key not in self._works:
            ways = plan.recompute.split("|")
            quick = [_uniform_stages(plan, way) for way in ways if way != "full" or len(ways) == 1]
            quick = [replace(each, zero=each.level, nodes=None, loss_chunks=1) for each in quick]
            if plan.batch_over in MIXED:
                quick = [_used(each, use) for each in quick for use in (False, True)]
            alike = all(bodies.shared(each) is not None for each in quick)
            whole = [replace(each, zero=0, schedule="1f1b", virtual_stages=None) for each in quick]
            calls = [found for each in whole if alike and (found := tables.calls_at_once(each)) is not None]
            known = len(calls) == len(whole)
            instead = dict.fromkeys(tables.looked_up(whole[0]) if known else (), 0.0)
            if plan.loss_chunks > 1:
                sizes = sizes_of(plan)
                share = sizes[PIPELINE_AXIS] / math.prod(sizes.values())
                instead |= {index: share * flops / self.peak for index, flops in self._losses.items()}
            self._works[key] = Work.of(whole[0], calls, instead, self.tables.links(whole[0])) if known else None
        return self._works[key]

    def filled(self, plan: ParallelPlan, known: Bound) -> Bound:
        """The bound with bytes from the tables, if they hold for the plan; else `known`."""
        names = plan.recompute, plan.zero, plan.schedule, plan.virtual_stages, plan.microbatches, plan.loss_chunks
        key: tuple[object, ...] = (
            *names,
            plan.stage_calls,
            plan.nodes,
            *sizes_of(plan).values(),
            plan.experts,
            plan.batch_over,
            inner_axes(plan),
        )  # not the links
        if key not in self._bytes_of:
            self._bytes_of[key] = self._filled(plan)
        return replace(known, bytes=max(known.bytes, self._bytes_of[key]))

    def _filled(self, plan: ParallelPlan) -> int:
        rooms, shares = self._by_stage(plan, self.tables.room), self.tables.shares(_uniform_stages(plan))
        if rooms is None or shares is None:
            return 0
        stages = self._stages(plan)
        rows = self._in_flight(plan.schedule, stages.ranks, len(stages.places), plan.microbatches)
        saved = [room.saved[end] - room.saved[start] for room, (start, end) in zip(rooms, stages.cuts, strict=True)]
        least = 0
        for place in range(stages.ranks):
            flight = max((sum(count * saved[stage] for stage, count in mix) for mix in rows[place]), default=0)
            held = int(stages.of_place(shares.held, place))
            least = max(least, held + int(flight) + stages.inside(place, rooms, shares))
        return self.resident(plan, least)

    def summed(self, plan: ParallelPlan, known: Bound) -> Bound:
        """The bound from sums over calls and microbatches, if the tables hold for the plan; else `known`."""
        timed = self._timed(plan)
        if timed is None:
            return known
        seconds = max(timed.seconds(place) for place in range(timed.stages.ranks))
        return replace(known, seconds=max(known.seconds, seconds))

    def scheduled(self, plan: ParallelPlan, known: Bound) -> Bound:
        """The bound from the schedule, played with the durations of stages; `known` if there is one pipeline rank."""
        timed = self._timed(plan) if sizes_of(plan)[PIPELINE_AXIS] > 1 else None
        if timed is None:
            return known
        return replace(known, seconds=max(known.seconds, timed.scheduled()))

    def _timed(self, plan: ParallelPlan) -> TimedStages | None:
        calls, shares = self._by_stage(plan, self.tables.calls), self.tables.shares(_uniform_stages(plan))
        if calls is None or shares is None:
            return None
        return TimedStages(stages=self._stages(plan), calls=calls, shares=shares, tables=self.tables)

    def _stages(self, plan: ParallelPlan, body: ParallelPlan | None = None) -> Stages:
        """The stages of a plan, which balance the calls of `body` (by default, the plan itself)."""
        kind, ranks = SCHEDULES[plan.schedule], sizes_of(plan)[PIPELINE_AXIS]
        places = stage_ranks(kind, ranks, stages_of(plan))
        if plan.stage_calls in (None, FITTED):
            cuts: Cuts = self.tables.cuts(body or _uniform_stages(plan), len(places))
        else:
            cuts = tuple(pairwise(accumulate(map(int, expanded(plan.stage_calls, ",")), initial=0)))
        links = self.tables.stage_links(body or _uniform_stages(plan), cuts)
        return Stages(plan=plan, ranks=ranks, places=places, cuts=cuts, links=links)

    def _by_stage(self, plan: ParallelPlan, table: Callable[[ParallelPlan], _Table | None]) -> Sequence[_Table] | None:
        """For each stage, the table for its way of recomputing; None if one is not known."""
        kinds = stage_kinds(plan.recompute)
        found = [each for each in (table(_uniform_stages(plan, kind)) for kind in kinds) if each is not None]
        return None if len(found) < len(kinds) else found * stages_of(plan) if len(found) == 1 else found

    def lasting_bytes(self, plan: ParallelPlan, size: int, spread: int) -> int:
        """The bytes of parameters, gradients and states on a rank, if `spread` ranks share parameters of `size`
        bytes.
        """
        if plan.level == 0:
            return (2 + self.states) * size
        part = size // spread
        whole = 0
        if plan.level < 3:  # the parameters that computations read stay whole, in at least 16 bits
            whole = size if plan.precision in ("fp32", "fp64") else size // 2
        if plan.level == 1:  # gradients are also accumulated whole
            whole += size
        return (2 + self.states) * part + whole

    def _in_flight(self, schedule: str, ranks: int, stages: int, microbatches: int) -> Sequence[Sequence[InFlight]]:
        """The sets of microbatches in flight on each pipeline rank. With more microbatches, they do not become
        smaller.
        """
        count = min(microbatches, _MOST_FLIGHT * stages)
        key = schedule, ranks, stages, count
        if key not in self._flights:
            rows = compute_order(SCHEDULES[schedule], ranks, count, stages)
            self._flights[key] = tuple(microbatches_in_flight(row) for row in rows)
        return self._flights[key]


def _uniform_stages(plan: ParallelPlan, way: str = "") -> ParallelPlan:
    """The plan with balanced stages that all recompute in one way (by default, the first stage's)."""
    way = way or stage_kinds(plan.recompute.partition("|")[0])[0]
    return plan if (plan.stage_calls, plan.recompute) == (None, way) else replace(plan, stage_calls=None, recompute=way)


def _used(plan: ParallelPlan, batch: bool) -> ParallelPlan:
    """The plan in which tp cuts the batch of all calls, or the weights of all."""
    return replace(plan, batch_over=f"{TENSOR_AXIS}=*" if batch else None)
