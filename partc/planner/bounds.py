"""Lower bounds on the seconds and bytes of a plan.

The first bound follows from the model alone: every floating-point operation runs on some rank, at the device's peak
at most, and the ranks of a stage hold the largest matrix product between them. The second one adds up the calls of each
rank's whole batch, and the pipeline's filling, as if no wave of tiles was partly empty: parts of the batch take no
less, so that one table serves all numbers of microbatches. The others add
up what the simulator takes for each call (`tables`), in closed form, or along the schedule:

- A pipeline rank computes all its microbatches, after its first one has passed the stages before it; after its last
  one, gradients return through these stages.
- Collectives over the batch's axes follow each other. Computation beside them is slower, by the rates' slowdown.
- The sums of gradients start in the last backward pass of a stage. At the end parameters are updated. Under ZeRO 1 and
  2 they are gathered as the next step begins: beside the gathers over some axes, a rank runs one forward pass at most.
- A rank holds its parameters, gradients and optimizer states, and the values that its microbatches in flight saved,
  besides those inside the largest call.

Communication that these leave out only delays a step, and no memory that they leave out is negative.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from partc.compilation.plan import ParallelPlan
from partc.cost.flops import StepFlops, model_work
from partc.cost.forecast import UPDATE
from partc.cost.saved_tensors import flights
from partc.cost.simulation import Durations, simulate
from partc.ir.mesh import PIPELINE_AXIS, TENSOR_AXIS
from partc.ir.program import FLOATING, ITEMSIZE, Action, Parameter, Program
from partc.passes.stages import staged
from partc.planner.space import Family, expert_parts, inside, sizes_of, stages_of
from partc.planner.tables import LOOKUP, Axes, CallTable, RoomTable, ShareTable, Sums, Tables
from partc.schedules import SCHEDULES, Compute, compute_order, stage_ranks
from partc.sharding.placements import expert_weights

Cuts = Sequence[tuple[int, int]]

_LEAST = 1 - 1e-6  # of seconds whose parts are of rounded numbers of bytes
_MOST_FLIGHT = 4  # rounds of a pipeline after which no more microbatches are in flight than before


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """No run of a plan takes fewer seconds, or holds fewer bytes on its fullest rank."""

    seconds: float
    bytes: int


@dataclass
class Bounds:
    """The bounds of plans of one model; `peak`, and `attention` of fused attention, are in flops a second of a rank,
    `states` in copies of a parameter.
    """

    annotated: Program  # with shapes of the whole batch
    peak: float
    attention: float
    states: int
    tables: Tables
    filled_tiles: (
        Tables  # with rates under which parts of a batch take no less than their share of the whole one's time
    )
    resident: Callable[[ParallelPlan, int], int]  # the memory of a process whose tensors hold so many bytes
    _flops: StepFlops = field(init=False)
    _calls: int = field(init=False)
    _bytes: int = field(init=False)  # of trained parameters besides experts
    _experts: int = field(init=False)
    _product: int = field(init=False)  # of the largest result of a matrix product
    _flights: dict[tuple[str, int, int, int], tuple[tuple[tuple[tuple[int, int], ...], ...], ...]] = field(
        default_factory=dict
    )

    _bytes_of: dict[tuple[object, ...], int] = field(default_factory=dict)
    _works: dict[tuple[object, ...], Work | None] = field(default_factory=dict)
    _least: dict[tuple[object, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._flops = model_work(self.annotated)
        self._calls = len(staged(self.annotated)[0])
        tables, experts = set(_tables(self.annotated)), set(expert_parameters(self.annotated))
        sizes = {
            item.name: math.prod(item.type.shape) * _item(item)
            for item in self.annotated.parameters
            if item.trainable and item.name not in tables
        }
        self._experts = sum(size for name, size in sizes.items() if name in experts)
        self._bytes = sum(sizes.values()) - self._experts
        self._product = max(_products(self.annotated), default=0)

    def of(self, plan: ParallelPlan) -> Bound:
        """The tightest bound of a plan."""
        return self.scheduled(plan, self.summed(plan, self.filled(plan, self.wide(plan, self.simple(plan)))))

    def simple(self, plan: ParallelPlan) -> Bound:
        """The bound that follows from flops, parameters and the largest product alone.

        Of stages that are finer than the calls nothing is said that full recomputation computes again.
        """
        sizes = sizes_of(plan)
        ranks = math.prod(sizes.values())
        if plan.level == 0:
            stage = self._bytes // sizes[TENSOR_AXIS] + self._experts // expert_parts(plan)
            held = stage // sizes[PIPELINE_AXIS]
        else:  # tables may be cut by rows over dp, so that nothing is said here of whole parameters under ZeRO
            held = (self._bytes + self._experts) // ranks
        product = self._product * sizes[PIPELINE_AXIS] // (ranks * plan.microbatches * plan.loss_chunks)
        least = self.resident(plan, max((2 + self.states) * held, product))
        again = plan.recompute == "full" and stages_of(plan) <= self._calls
        return Bound(seconds=self.computed(again=again) / ranks, bytes=least)

    def computed(self, *, again: bool = False) -> float:
        """The least seconds of one rank that computes all products of a step, or also those that full recomputation
        computes again.
        """
        work = self._flops
        seconds = work.products / self.peak + work.attention / self.attention
        return seconds + again * (work.products_again / self.peak + work.attention_again / self.attention)

    def of_family(self, family: Family, known: Bound, limit: float = math.inf) -> Bound:
        """The bound of all plans of a family that hold at most `limit` bytes, or `known`."""
        ways = (way for way in family.ways() if self.simple(replace(way, zero=family.least.zero)).bytes <= limit)
        return replace(known, seconds=max(known.seconds, min(map(self._wide, ways), default=0.0)))

    def wide(self, plan: ParallelPlan, known: Bound) -> Bound:
        """The bound from a batch that is computed at once, and the pipeline's filling, or `known`."""
        return replace(known, seconds=max(known.seconds, self._wide(plan)))

    def _wide(self, plan: ParallelPlan) -> float:
        """The seconds of the slowest rank, which waits for the first microbatch to pass the stages before; after its
        last one, gradients return through these stages. 0 if they are not known.
        """
        key = plan.mesh, plan.experts, plan.recompute, plan.loss_chunks
        way = *key, plan.schedule, plan.virtual_stages, plan.microbatches
        if way not in self._least:
            work = self._work(plan, key)
            stages = None if work is None else self._stages(work.plan, plan)
            self._least[way] = _LEAST * work.seconds(stages, plan.microbatches) if work and stages else 0.0
        return self._least[way]

    def _work(self, plan: ParallelPlan, key: tuple[object, ...]) -> Work | None:
        """The work of a rank's whole local batch as one microbatch, without lookups; None if it is not known."""
        bodies = self.tables.bodies
        key = plan.microbatches if not bodies.everywhere else plan.microbatches > 1, *key
        if key not in self._works:
            whole = replace(plan, zero=0, schedule="1f1b", virtual_stages=None)
            alike = bodies.shared(plan) is not None
            calls = self.filled_tiles.calls_at_once(whole) if alike else None
            looked_up = self.filled_tiles.looked_up(whole) if calls is not None else ()
            self._works[key] = None if calls is None else Work.of(whole, calls, looked_up)
        return self._works[key]

    def filled(self, plan: ParallelPlan, known: Bound) -> Bound:
        """The bound with the bytes of tables, where these are known to hold for the plan, or `known`."""
        names = plan.recompute, plan.zero, plan.schedule, plan.virtual_stages, plan.microbatches, plan.loss_chunks
        key: tuple[object, ...] = (*names, *sizes_of(plan).values(), plan.experts, inside(plan))  # not the links
        if key not in self._bytes_of:
            self._bytes_of[key] = self._filled(plan)
        return replace(known, bytes=max(known.bytes, self._bytes_of[key]))

    def _filled(self, plan: ParallelPlan) -> int:
        room, shares = self.tables.room(plan), self.tables.shares(plan)
        if room is None or shares is None:
            return 0
        stages = self._stages(plan, plan)
        rows = self._in_flight(plan.schedule, stages.ranks, len(stages.places), plan.microbatches)
        saved = [room.saved[end] - room.saved[start] for start, end in stages.cuts]
        least = 0
        for place in range(stages.ranks):
            flight = max((sum(count * saved[stage] for stage, count in mix) for mix in rows[place]), default=0)
            held = int(stages.of_place(shares.held, place))
            least = max(least, held + int(flight) + stages.inside(place, room, shares))
        return self.resident(plan, least)

    def summed(self, plan: ParallelPlan, known: Bound) -> Bound:
        """The bound from sums over calls and microbatches, where these are known to hold for the plan, or `known`."""
        timed = self._timed(plan)
        if timed is None:
            return known
        seconds = max(timed.seconds(place) for place in range(timed.stages.ranks))
        return replace(known, seconds=max(known.seconds, seconds))

    def scheduled(self, plan: ParallelPlan, known: Bound) -> Bound:
        """The bound from the schedule, played with the durations of stages; that of one pipeline rank is `known`."""
        timed = self._timed(plan) if sizes_of(plan)[PIPELINE_AXIS] > 1 else None
        if timed is None:
            return known
        return replace(known, seconds=max(known.seconds, timed.scheduled()))

    def _timed(self, plan: ParallelPlan) -> TimedStages | None:
        calls, shares = self.tables.calls(plan), self.tables.shares(plan)
        if calls is None or shares is None:
            return None
        return TimedStages(stages=self._stages(plan, plan), calls=calls, shares=shares, tables=self.tables)

    def _stages(self, body: ParallelPlan, plan: ParallelPlan) -> Stages:
        """The stages of a plan, which cut the calls of a `body`."""
        kind, ranks = SCHEDULES[plan.schedule], sizes_of(plan)[PIPELINE_AXIS]
        each = plan.virtual_stages or kind.stages_per_rank if ranks > 1 else 1
        places = stage_ranks(kind, ranks, ranks * each)
        return Stages(plan=plan, ranks=ranks, places=places, cuts=self.tables.cuts(body, len(places)))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The least seconds of the calls of a whole batch, as sums over the calls before each."""

    plan: ParallelPlan
    forward: Sums
    sent: Sums  # backward passes until their gradients are sent
    inputs: Sums  # first halves of backward passes
    backward: Sums  # whole backward passes

    @classmethod
    def of(cls, plan: ParallelPlan, calls: CallTable, without: Collection[int]) -> Work:
        rows = []
        for index in range(len(calls.forward) - 1):
            columns = calls.forward, calls.backward, calls.inputs, calls.weights, calls.sent, calls.rest
            forward, backward, inputs, weights, sent, rest = (each[index + 1] - each[index] for each in columns)
            least = min(backward, inputs + weights, sent + rest)
            row = forward, min(sent, least), min(inputs, least), least
            rows.append((0.0,) * len(row) if index in without else row)
        sums = [tuple(accumulate(column, initial=0.0)) for column in zip(*rows, strict=True)]
        return cls(plan=plan, forward=sums[0], sent=sums[1], inputs=sums[2], backward=sums[3])

    def seconds(self, stages: Stages, microbatches: int) -> float:
        """The least seconds of a step; a part of the batch takes no less than its share."""
        least, first_pass = 0.0, self.inputs if stages.halved else self.sent
        for place, here in enumerate(stages.at):
            forward, first, backward = (
                stages.of_place(sums, place) for sums in (self.forward, first_pass, self.backward)
            )
            start, end = stages.cuts[here[0]]
            fill, drain = self.forward[start] / microbatches, first_pass[start] / microbatches
            left = backward - first  # that may run beside the drain
            if not stages.halved:
                left = (self.backward[end] - self.backward[start] - first_pass[end] + first_pass[start]) / microbatches
            least = max(least, fill + forward + backward + max(0.0, drain - left))
        return least


def _tables(program: Program) -> Iterator[str]:
    """The parameters whose rows are looked up."""
    for call in program.calls:
        region = program.region(call.region)
        looked_up = {next(op.refs(), "") for op in region.forward.ops if op.name.startswith(LOOKUP)}
        names = zip(region.params, call.params, strict=True)
        yield from (name for value, name in names if value.name in looked_up)


def _products(program: Program) -> Iterator[int]:
    """The bytes of the results of matrix products."""
    for region in program.regions:
        if region.phase == "microbatch":
            products = (op.result.type for op in region.forward.ops if op.name in ("linear", "matmul"))
            yield from (math.prod(type.shape) * ITEMSIZE[type.dtype] for type in products)


def expert_count(program: Program) -> int:
    """The largest number that divides the numbers of experts of all layers; 0 without experts."""
    found = 0
    for region in program.regions:
        types = region.types(region.forward)
        for op in region.forward.ops:
            if op.name == "expert_matmul":
                found = math.gcd(found, types[[*op.refs()][-1]].shape[0])
    return found


def expert_parameters(program: Program) -> Iterator[str]:
    """The parameters that are weights of experts."""
    for call in program.calls:
        region = program.region(call.region)
        weights = expert_weights(region.forward, region.types(region.forward))
        yield from (name for value, name in zip(region.params, call.params, strict=True) if value.name in weights)


def _item(parameter: Parameter) -> int:
    return ITEMSIZE[parameter.type.dtype] if parameter.type.dtype in FLOATING else 0


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of a plan: their ranks and their calls."""

    plan: ParallelPlan
    ranks: int
    places: Sequence[int]
    cuts: Cuts

    @cached_property
    def at(self) -> Sequence[Sequence[int]]:
        """The stages of each rank, in order."""
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, place in enumerate(self.places):
            found[place].append(stage)
        return found

    @property
    def halved(self) -> bool:
        """Whether the schedule runs the halves of backward passes apart."""
        return SCHEDULES[self.plan.schedule].split_backward

    def sends(self, stage: int) -> bool:
        """Whether a stage sends its gradients before the rest of its backward pass, if it has halves."""
        return stage > 0 and self.plan.level < 2 and self.places[stage] != self.places[stage - 1]

    def of_place(self, sums: Sums, place: int) -> float:
        return sum(sums[end] - sums[start] for start, end in (self.cuts[stage] for stage in self.at[place]))

    def inside(self, place: int, room: RoomTable, shares: ShareTable) -> int:
        """The most bytes inside a call of a rank, besides saved values."""
        most = 0
        for stage in self.at[place]:
            start, end = self.cuts[stage]
            last = {room.names[index]: index for index in range(start, end)}
            for index in last.values():
                forward, whole, halves = room.alive[index]
                gathered, scattered = shares.around[index]
                backward = halves if self.halved else min(whole, halves) if self.sends(stage) else whole
                most = max(most, 2 * gathered + max(forward, backward + scattered))
        return most


@dataclass(frozen=True, kw_only=True)
class TimedStages:
    """The seconds of a plan's stages."""

    stages: Stages
    calls: CallTable
    shares: ShareTable
    tables: Tables

    @cached_property
    def durations(self) -> Sequence[Durations]:
        """The durations of each stage's actions; I and W are the parts before and after gradients are sent."""
        calls = self.calls
        found = []
        for stage, (start, end) in enumerate(self.stages.cuts):
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
                    transfer=min(self.hop(stage), self.hop(stage + 1)),
                )
            )
        return found

    def hop(self, stage: int) -> float:
        """Seconds until a value of the stage before has arrived; that of the first stage, and the end, do not count."""
        if not 0 < stage < len(self.stages.places):
            return math.inf
        if self.stages.places[stage] == self.stages.places[stage - 1]:
            return 0.0
        size = self.calls.crossing[self.stages.cuts[stage][0]]
        return self.tables.transfer(self.stages.plan, self.stages.places[stage - 1], self.stages.places[stage], size)

    def sums(self, stages: Iterable[int]) -> float:
        """The least seconds of the sums of gradients of some stages, once per step."""
        longest = 0.0
        for (op, axes), sums in self.shares.sums.items():
            size = sum(sums[self.stages.cuts[stage][1]] - sums[self.stages.cuts[stage][0]] for stage in stages)
            if size:
                longest = max(longest, self.tables.collective(self.stages.plan, op, axes, int(size)))
        return longest

    def moved(self, place: int) -> float:
        """The least seconds of a rank's gathers and scatters for a microbatch.

        The last forward pass that needs a gather may share it with its backward pass, and the first call's backward
        pass with the next forward pass.
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

        It waits for the stage's updated parameters, which are gathered in order. A call that communicates over the same
        axes waits for all of the rank.
        """
        found, forward = dict.fromkeys(self.stages.at[place], 0.0), self.calls.forward
        for axes, sums in self.shares.refreshed.items():
            every, done = self.stages.of_place(sums, place), 0.0
            for stage in found:
                start, end = self.stages.cuts[stage]
                done += sums[end] - sums[start]
                last = next((index for index in reversed(range(start, end)) if sums[index + 1] > sums[index]), None)
                meets = next((index for index in range(start, end) if axes in self.calls.meeting[index]), None)
                if last is not None:
                    found[stage] = max(found[stage], done + forward[end] - forward[last])
                if meets is not None:
                    found[stage] = max(found[stage], every + forward[end] - forward[meets + 1])
        return found

    def ended(self, place: int) -> float:
        """Seconds of a rank's update."""
        return self.tables.rates.update(UPDATE * self.stages.of_place(self.shares.updated, place))

    def seconds(self, place: int) -> float:
        """The least seconds until a rank has ended its step."""
        times, here = self.stages.plan.microbatches, self.stages.at[place]
        own = [self.durations[stage] for stage in here]
        first = here[0]
        before = self.durations[:first]
        hops = sum(self.hop(stage) for stage in range(1, first + 1))
        fill = hops + sum(each.forward for each in before)
        drain = hops + sum(each.inputs for each in before)
        ahead = times * sum(each.forward + each.inputs for each in own)
        work = times * sum(each.forward + each.backward for each in own)
        free = times * self.stages.of_place(self.calls.moving, place) + fill + drain
        moved = times * self.moved(place)
        summed = self.sums(here)
        slowed = self.tables.rates.slowdown * max(0.0, min(max(moved, summed), work) - free)
        last = own[0].backward if len(here) == 1 else sum(each.backward for each in own) * times
        late = max(0.0, self.passed(place)[first] - fill - own[0].forward)
        done = max(work + late + slowed, moved - fill, work + late - last + summed)
        through = fill + late + ahead + drain + (self.durations[0].weights if first else own[0].weights)
        if not self.stages.halved:
            through = max(through, fill + late + work - own[0].weights + drain)
        return max(fill + done + self.ended(place), through)

    def scheduled(self) -> float:
        """The least seconds of the step, with computations in the order of the schedule."""
        kind = SCHEDULES[self.stages.plan.schedule]
        rows = [
            [part for each in row for part in self._parts(each)]
            for row in compute_order(kind, self.stages.ranks, self.stages.plan.microbatches, len(self.stages.places))
        ]
        passed = [self.passed(place) for place in range(self.stages.ranks)]

        def play(rank: int, action: Action | Compute, start: float) -> float:
            takes = self.durations[action.stage].of(action.kind)
            return max(takes, passed[rank][action.stage] - start) if action.kind == "F" else takes

        done = simulate(rows, self.stages.places, durations=self.durations, play=play)
        least = 0.0
        for place, spans in enumerate(done.ranks):
            last = {span.compute.stage: span.start for span in spans}
            end, left = spans[-1].end, list(self.stages.at[place])
            for stage in sorted(last, key=lambda stage: last[stage]):
                end = max(end, last[stage] + self.sums(left))
                left.remove(stage)
            least = max(least, end + self.ended(place))
        return least

    def _parts(self, compute: Compute) -> Iterator[Compute]:
        """A backward pass as its part before gradients are sent, and the rest."""
        if compute.kind == "B" and self.durations[compute.stage].weights:
            yield Compute(compute.stage, "I", compute.microbatch)
            yield Compute(compute.stage, "W", compute.microbatch)
        else:
            yield compute
