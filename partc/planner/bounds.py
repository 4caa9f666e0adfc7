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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, combinations, pairwise
from typing import Any, TypeVar

import numpy as np

from partc.compilation.plan import ParallelPlan
from partc.cost.flops import ProductWork, StepWork, model_work
from partc.cost.forecast import UPDATE
from partc.cost.saved_tensors import microbatches_in_flight
from partc.cost.simulation import Durations, Link, OrderedCompute, in_order
from partc.ir.expert_products import ExpertMatmul
from partc.ir.mesh import BATCH_AXIS, PIPELINE_AXIS, TENSOR_AXIS, Mesh
from partc.ir.program import FLOATING, ITEMSIZE, Call, Parameter, Program, Region
from partc.passes.stages import staged_calls
from partc.planner.space import FITTED, MIXED, Family, expert_parts, inner_axes, mesh_of, sizes_of, stages_of
from partc.planner.stage_fitting import StageNeeds, cuttable, fit, fit_ways, fits, range_sums, slowest
from partc.planner.tables import LOOKUP, Axes, CallTable, RoomTable, ShareTable, Sums, Tables
from partc.planner.use_fitting import HIDDEN, UseNeeds, fit_uses
from partc.schedules import SCHEDULES, Compute, compute_order, stage_ranks
from partc.schedules.per_stage import expanded, shortened, stage_kinds
from partc.sharding.placements import expert_weights
from partc.sharding.uses import BatchUse, uses_text

Cuts = Sequence[tuple[int, int]]
_Table = TypeVar("_Table")

_LEAST = 1 - 1e-6  # margin for seconds that are added up from rounded numbers of bytes
_MUCH = 1e9  # seconds
_PAIRED = 8  # of at most so many calls, two get the other use at once
_FITS = 3  # so often are uses fitted, each time to less memory
_ORDERS = 16  # orders of computations that are kept: one may have 50,000
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
    _flights: dict[tuple[str, int, int, int], tuple[tuple[tuple[tuple[int, int], ...], ...], ...]] = field(
        default_factory=dict
    )

    _computed: dict[tuple[bool, bool], float] = field(default_factory=dict)
    _bytes_of: dict[tuple[object, ...], int] = field(default_factory=dict)
    _works: dict[tuple[object, ...], Work | None] = field(default_factory=dict)
    _separate: dict[tuple[object, ...], bool] = field(default_factory=dict)
    _least: dict[tuple[object, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._products = model_work(self.annotated)
        calls = staged_calls(self.annotated)[0]
        self._calls = len(calls)
        tables, experts = set(_tables(self.annotated)), set(expert_parameters(self.annotated))
        sizes = {
            item.name: math.prod(item.type.shape) * _item(item)
            for item in self.annotated.parameters
            if item.trainable and item.name not in tables
        }
        self._experts = sum(size for name, size in sizes.items() if name in experts)
        self._bytes = sum(sizes.values()) - self._experts
        self._product = largest_product(self.annotated)
        largest = {
            region.name: flops
            for region in self.annotated.regions
            for size, flops in _products(region)
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
            self._separate[several] = bodies.separate_batches(_uniform_stages(plan))
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

    def _in_flight(
        self, schedule: str, ranks: int, stages: int, microbatches: int
    ) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
        """The sets of microbatches in flight on each pipeline rank. With more microbatches, they do not become
        smaller.
        """
        count = min(microbatches, _MOST_FLIGHT * stages)
        key = schedule, ranks, stages, count
        if key not in self._flights:
            rows = compute_order(SCHEDULES[schedule], ranks, count, stages)
            self._flights[key] = tuple(microbatches_in_flight(row) for row in rows)
        return self._flights[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The least seconds of the calls of a whole batch, as sums over the calls before each call."""

    plan: ParallelPlan  # a plan with these calls
    forward: Sums
    backward: Sums  # whole backward passes
    first: Mapping[bool, Sums]  # the parts of backward passes before gradients are sent; True: with halves
    left: Mapping[bool, Sums]  # the parts after that, at most
    # For each call, the seconds of the calls that run before it, and of those that run after its backward pass.
    before: Sums
    after: Mapping[bool, Sums]

    @classmethod
    def of(
        cls,
        plan: ParallelPlan,
        tables: Sequence[CallTable],
        instead: Mapping[int, float],
        links: Mapping[tuple[int, int], bool],
    ) -> Work:
        """The work of calls, of which some read values of others (`links`).

        Each has the seconds of the quickest table, unless `instead` has the seconds of its product, which is computed
        twice and has two gradients.
        """
        each = [np.array([cls._rows(table, index) for index in range(len(table.forward) - 1)]) for table in tables]
        rows = np.stack(each)
        least, most = rows.min(axis=0), (rows[..., 1:2] - rows[..., 2:]).max(axis=0)
        found = np.concatenate([least, most], axis=1)
        for index, product in instead.items():
            found[index] = (product, 3 * product, product, product, _MUCH, _MUCH)
        forward, backward, sent, inputs, rest, weights = (
            tuple(accumulate(column, initial=0.0)) for column in found.T.tolist()
        )
        first, left = {False: sent, True: inputs}, {False: rest, True: weights}
        reads = [(*pair, 0.0) for pair in links]
        returns = [(*pair, 0.0) for pair, gradient in links.items() if gradient]
        return cls(
            plan=plan,
            forward=forward,
            backward=backward,
            first=first,
            left=left,
            before=(*_longest(np.diff(forward).tolist(), reads), 0.0),
            after={halved: (*_longest(np.diff(sums).tolist(), returns), 0.0) for halved, sums in first.items()},
        )

    @staticmethod
    def _rows(table: CallTable, index: int) -> tuple[float, ...]:
        columns = table.forward, table.backward, table.inputs, table.weights, table.sent, table.rest
        forward, backward, inputs, weights, sent, rest = (each[index + 1] - each[index] for each in columns)
        least = min(backward, inputs + weights, sent + rest)
        return forward, least, min(sent, least), min(inputs, least)

    def seconds(self, stages: Stages, microbatches: int) -> float:
        """The least seconds of a step, if a part of the batch takes no less than its share."""
        least, first, left = 0.0, self.first[stages.halved], self.left[stages.halved]
        costs = [(self.forward[end] - self.forward[start]) / microbatches for start, end in stages.cuts]
        starts = _longest(costs, ((source, target, 0.0) for source, target, _ in stages.links))
        for place, here in enumerate(stages.at):
            work = stages.of_place(self.forward, place) + stages.of_place(self.backward, place)
            fill = min(starts[stage] for stage in here)
            if not stages.chained:  # the rank's last backward pass may be of any of its stages
                least = max(least, fill + work)
                continue
            start, end = stages.cuts[here[0]]
            drain = first[start] / microbatches
            beside = stages.of_place(left, place) if stages.halved else (left[end] - left[start]) / microbatches
            least = max(least, fill + work + max(0.0, drain - beside))
        return least

    def alone(self, microbatches: int, *, halved: bool) -> Any:
        """The least seconds of a step on a rank with one stage, for each first call and end of the stage."""
        fill, drain = (np.array(sums)[:, np.newaxis] / microbatches for sums in (self.before, self.after[halved]))
        beside = range_sums(np.array(self.left[halved])) / (1 if halved else microbatches)
        work = range_sums(np.add(self.forward, self.backward))
        return fill + work + np.maximum(0.0, drain - beside)


def _longest(costs: Sequence[float], links: Iterable[tuple[int, int, float]]) -> list[float]:
    """For each item, the largest sum of costs along a chain of links to it, without its own cost; each link adds its
    own cost.
    """
    found = [0.0] * len(costs)
    for source, target, cost in sorted(links, key=lambda link: link[1]):
        found[target] = max(found[target], found[source] + costs[source] + cost)
    return found


def _tables(program: Program) -> Iterator[str]:
    """The parameters whose rows are looked up."""
    for call in program.calls:
        region = program.region(call.region)
        looked_up = {next(op.refs(), "") for op in region.forward.ops if op.name.startswith(LOOKUP)}
        names = zip(region.params, call.params, strict=True)
        yield from (name for value, name in names if value.name in looked_up)


def largest_product(program: Program) -> int:
    """The bytes of the largest result of a matrix product."""
    return max((size for region in program.regions for size, _ in _products(region)), default=0)


def _products(region: Region) -> Iterator[tuple[int, int]]:
    """Yields the bytes of the result of each matrix product, and its flops."""
    types = region.types(region.forward)
    for op in region.forward.ops if region.phase == "microbatch" else ():
        if op.name in ("linear", "matmul"):
            count = math.prod(op.result.type.shape)
            yield count * ITEMSIZE[op.result.type.dtype], 2 * count * types[next(op.refs())].shape[-1]


def expert_count(program: Program) -> int:
    """The greatest common divisor of all layers' numbers of experts; 0 without experts."""
    found = 0
    for region in program.regions:
        types = region.types(region.forward)
        for op in region.forward.ops:
            if product := ExpertMatmul.of(op):
                found = math.gcd(found, types[product.weights].shape[0])
    return found


def expert_parameters(program: Program) -> Iterator[str]:
    """The parameters that are weights of experts."""
    for call in program.calls:
        region = program.region(call.region)
        weights = expert_weights(region.forward, region.types(region.forward))
        yield from (name for value, name in zip(region.params, call.params, strict=True) if value.name in weights)


def _uniform_stages(plan: ParallelPlan, way: str = "") -> ParallelPlan:
    """The plan with balanced stages that all recompute in one way (by default, the first stage's)."""
    way = way or stage_kinds(plan.recompute.partition("|")[0])[0]
    return plan if (plan.stage_calls, plan.recompute) == (None, way) else replace(plan, stage_calls=None, recompute=way)


def _used(plan: ParallelPlan, batch: bool) -> ParallelPlan:
    """The plan in which tp cuts the batch of all calls, or the weights of all."""
    return replace(plan, batch_over=f"{TENSOR_AXIS}=*" if batch else None)


def _item(parameter: Parameter) -> int:
    return ITEMSIZE[parameter.type.dtype] if parameter.type.dtype in FLOATING else 0


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of a plan: their ranks and their calls."""

    plan: ParallelPlan
    ranks: int
    places: Sequence[int]
    cuts: Cuts
    links: Sequence[Link]

    @cached_property
    def at(self) -> Sequence[Sequence[int]]:
        """The stages of each rank, in order."""
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, place in enumerate(self.places):
            found[place].append(stage)
        return found

    @property
    def halved(self) -> bool:
        """Whether the schedule runs the two halves of backward passes as separate actions."""
        return SCHEDULES[self.plan.schedule].split_backward

    def sends(self, stage: int) -> bool:
        """Whether a stage with backward halves sends its gradients before the rest of its backward pass."""
        return self.plan.level < 2 and stage in self._returning

    @cached_property
    def _returning(self) -> frozenset[int]:
        """The stages that return gradients to other ranks."""
        return frozenset(
            target for source, target, gradient in self.links if gradient and self.places[source] != self.places[target]
        )

    @cached_property
    def chained(self) -> bool:
        """Whether each stage reads values of the one before it, and returns their gradients."""
        return {(stage - 1, stage, True) for stage in range(1, len(self.places))}.issubset(self.links)

    def order(self, halves: tuple[bool, ...]) -> Sequence[OrderedCompute]:
        """The computations of all ranks. With `halves`, a stage's backward passes run in two parts: the one before its
        gradients are sent, and the rest.
        """
        plan, places = self.plan, tuple(self.places)
        return _order(plan.schedule, self.ranks, plan.microbatches, places, halves, tuple(self.links))

    def of_place(self, sums: Sums, place: int) -> float:
        return sum(sums[end] - sums[start] for start, end in (self.cuts[stage] for stage in self.at[place]))

    def inside(self, place: int, rooms: Sequence[RoomTable], shares: ShareTable) -> int:
        """The most bytes inside a call of a rank, besides saved values."""
        most = 0
        for stage in self.at[place]:
            start, end = self.cuts[stage]
            last = {rooms[stage].names[index]: index for index in range(start, end)}
            for index in last.values():
                forward, whole, halves = rooms[stage].alive[index]
                gathered, scattered = shares.around[index]
                backward = halves if self.halved else min(whole, halves) if self.sends(stage) else whole
                most = max(most, 2 * gathered + max(forward, backward + scattered))
        return most

    def inside_calls(self, room: RoomTable, shares: ShareTable) -> Any:
        """The bytes inside each call, on a stage that does not send its gradients before the rest of its backward
        pass.
        """
        alive, around = (np.array(each, dtype=np.float64).T for each in (room.alive, shares.around))
        return 2 * around[0] + np.maximum(alive[0], alive[2 if self.halved else 1] + around[1])


@lru_cache(maxsize=_ORDERS)
def _order(
    schedule: str,
    ranks: int,
    microbatches: int,
    places: tuple[int, ...],
    halves: tuple[bool, ...],
    links: tuple[Link, ...],
) -> Sequence[OrderedCompute]:
    def parts(compute: Compute) -> Iterator[Compute]:
        if compute.kind == "B" and halves[compute.stage]:
            yield Compute(compute.stage, "I", compute.microbatch)
            yield Compute(compute.stage, "W", compute.microbatch)
        else:
            yield compute

    rows = compute_order(SCHEDULES[schedule], ranks, microbatches, len(places))
    return in_order([[part for each in row for part in parts(each)] for row in rows], places, links)


@dataclass(frozen=True, kw_only=True)
class TimedStages:
    """The seconds of a plan's stages."""

    stages: Stages
    calls: Sequence[CallTable]  # by stage
    shares: ShareTable
    tables: Tables

    @cached_property
    def durations(self) -> Sequence[Durations]:
        """The durations of each stage's actions. I and W are the parts of a backward pass before and after gradients
        are sent.
        """
        found = []
        for stage, (calls, (start, end)) in enumerate(zip(self.calls, self.stages.cuts, strict=True)):
            whole = calls.backward[end] - calls.backward[start]
            inputs, weights = whole, 0.0
            if self.stages.halved:
                inputs, weights = (sums[end] - sums[start] for sums in (calls.inputs, calls.weights))
            elif self.stages.sends(stage):
                inputs, weights = (sums[end] - sums[start] for sums in (calls.sent, calls.rest))
            found.append(
                Durations(
                    forward=calls.forward[end] - calls.forward[start],
                    backward=inputs + weights,
                    inputs=inputs,
                    weights=weights,
                    transfer=min(self.hops[stage], self.hops[stage + 1]),
                )
            )
        return found

    @cached_property
    def hops(self) -> Sequence[float]:
        """For each stage, and the end behind the last: the seconds until a value of the previous stage has arrived;
        infinite for the first stage and the end.
        """
        places, found = self.stages.places, [math.inf]
        for stage, (source, target) in enumerate(pairwise(places), start=1):
            size = self.calls[stage].crossing[self.stages.cuts[stage][0]]
            found.append(0.0 if source == target else self.tables.transfer(self.stages.plan, source, target, size))
        return [*found, math.inf]

    def sums(self, stages: Iterable[int]) -> float:
        """The least seconds of the sums of some stages' gradients, once per step."""
        longest = 0.0
        for (op, axes), sums in self.shares.sums.items():
            size = sum(sums[self.stages.cuts[stage][1]] - sums[self.stages.cuts[stage][0]] for stage in stages)
            if size:
                longest = max(longest, self.tables.collective(self.stages.plan, op, axes, int(size)))
        return longest

    def moved(self, place: int) -> float:
        """The least seconds of a rank's gathers and scatters for a microbatch.

        The last forward pass that needs a gather may share it with its backward pass; the first call's backward pass
        may share one with the next forward pass.
        """
        total: defaultdict[Axes, float] = defaultdict(float)
        for axes, sums in self.shares.gathers.items():
            for start, end in (self.stages.cuts[stage] for stage in self.stages.at[place]):
                each = [seconds for seconds in self.shares.edges[axes][start:end] if seconds] or [0.0]
                total[axes] += max(0.0, sums[end] - sums[start] - each[0] - each[-1])
        for axes, sums in self.shares.scatters.items():
            total[axes] += self.stages.of_place(sums, place)
        return max(total.values(), default=0.0)

    def passed(self, place: int) -> Mapping[int, float]:
        """The least seconds from the step's start until the first forward pass of each of a rank's stages ends.

        The forward pass waits for the stage's updated parameters, which are gathered in order. A call that communicates
        over the same axes waits for all updated parameters of the rank.
        """
        found = dict.fromkeys(self.stages.at[place], 0.0)
        for axes, sums in self.shares.refreshed.items():
            every, done = self.stages.of_place(sums, place), 0.0
            for stage in found:
                (start, end), forward = self.stages.cuts[stage], self.calls[stage].forward
                done += sums[end] - sums[start]
                last = next((index for index in reversed(range(start, end)) if sums[index + 1] > sums[index]), None)
                meets = next(
                    (index for index in range(start, end) if axes in self.calls[stage].meeting["F"][index]), None
                )
                if last is not None:
                    found[stage] = max(found[stage], done + forward[end] - forward[last])
                if meets is not None:
                    found[stage] = max(found[stage], every + forward[end] - forward[meets + 1])
        return found

    def _scattered(self, kind: str) -> Sequence[Sequence[tuple[Axes, float]]]:
        """For each stage, the seconds of the scatters after a backward pass (B) or a half of it (I, W), by axes."""

        def seconds(axes: Axes, start: int, end: int) -> float:
            every, late = self.shares.scatters[axes], self.shares.late.get(axes)
            after = late[end] - late[start] if late else 0.0
            return after if kind == "W" else every[end] - every[start] - (after if kind == "I" else 0.0)

        return [[(axes, seconds(axes, *cut)) for axes in self.shares.scatters] for cut in self.stages.cuts]

    @cached_property
    def _met(self) -> Mapping[str, Sequence[Sequence[tuple[Axes, float]]]]:
        """For each kind of action and each stage, the axes over which the action communicates, and the seconds after
        the first call that does.
        """
        found: defaultdict[str, list[list[tuple[Axes, float]]]] = defaultdict(list)
        for calls, (start, end) in zip(self.calls, self.stages.cuts, strict=True):
            for kind, meeting in calls.meeting.items():
                first = {axes: index for index in reversed(range(start, end)) for axes in meeting[index]}
                rest = {axes: calls.forward[end] - calls.forward[index + 1] for axes, index in first.items()}
                found[kind].append([(axes, rest[axes] if kind == "F" else 0.0) for axes in first])
        return found

    def ended(self, place: int) -> float:
        """The seconds of a rank's update."""
        return self.tables.rates.streamed(UPDATE * self.stages.of_place(self.shares.updated, place))

    def seconds(self, place: int) -> float:
        """The least seconds until a rank ends its step."""
        times, here = self.stages.plan.microbatches, self.stages.at[place]
        own = [self.durations[stage] for stage in here]
        first = here[0]
        fill = min(self._starts[stage] for stage in here)
        drain = 0.0
        if self.stages.chained:
            hops = sum(self.hops[1 : first + 1])
            drain = hops + sum(each.inputs for each in self.durations[:first])
        work = times * sum(each.forward + each.backward for each in own)
        ends = ((self.calls[stage].moving, *self.stages.cuts[stage]) for stage in here)
        free = times * sum(moving[end] - moving[start] for moving, start, end in ends) + fill + drain
        moved = times * self.moved(place)
        summed = self.sums(here)
        slowed = self.tables.rates.slowdown * max(0.0, min(max(moved, summed), work) - free)
        last = own[0].backward if len(here) == 1 else sum(each.backward for each in own) * times
        late = max(0.0, self.passed(place)[first] - fill - own[0].forward) if self.stages.chained else 0.0
        done = max(work + late + slowed, moved - fill, work + late - last + summed)
        if not self.stages.chained:
            return fill + done + self.ended(place)
        ahead = times * sum(each.forward + each.inputs for each in own)
        through = fill + late + ahead + drain + (self.durations[0].weights if first else own[0].weights)
        if not self.stages.halved:
            through = max(through, fill + late + work - own[0].weights + drain)
        return max(fill + done + self.ended(place), through)

    @cached_property
    def _starts(self) -> Sequence[float]:
        """For each stage, the least seconds until the values that its first forward pass reads are there."""
        hops = (
            (source, target, self.hops[target] if target == source + 1 else 0.0)
            for source, target, _ in self.stages.links
        )
        return _longest([each.forward for each in self.durations], hops)

    def scheduled(self) -> float:
        """The least seconds of the step, with computations in the order of the schedule. Values that skip stages arrive
        at once.
        """
        passed = [self.passed(place) for place in range(self.stages.ranks)]
        each = [{kind: known.of(kind) for kind in "FBIW"} for known in self.durations]
        transfers = [known.transfer for known in self.durations]
        scattered = {kind: self._scattered(kind) for kind in "IBW"} if self.shares.scatters else {}
        busy: list[dict[Axes, float]] = [{} for _ in passed]  # by rank: the least seconds at which scatters end
        last: list[dict[int, float]] = [{} for _ in passed]  # by rank: the starts of its stages' last computations
        clocks, done = [0.0] * len(passed), list[float]()
        for step in self.stages.order(tuple(bool(known.weights) for known in self.durations)):
            rank, stage, kind = step.rank, step.stage, step.kind
            start = clocks[rank]
            for position, source in step.reads:
                travels = 0.0 if source is None or abs(stage - source) > 1 else transfers[source]
                start = max(start, done[position] + travels)
            takes = each[stage][kind]
            if kind == "F":
                takes = max(takes, passed[rank][stage] - start)
            if scattered:
                ends = busy[rank]
                for axes, rest in self._met[kind][stage] if ends else ():
                    takes = max(takes, ends.get(axes, 0.0) - start + rest)
                for axes, seconds in scattered[kind][stage] if kind != "F" else ():
                    ends[axes] = max(ends.get(axes, 0.0), start) + seconds
            last[rank][stage] = start
            clocks[rank] = start + takes
            done.append(clocks[rank])
        least = 0.0
        for place, starts in enumerate(last):
            end, left = max(clocks[place], *busy[place].values(), 0.0), list(self.stages.at[place])
            for stage in sorted(starts, key=lambda stage: starts[stage]):
                end = max(end, starts[stage] + self.sums(left))
                left.remove(stage)
            least = max(least, end + self.ended(place))
        return least
