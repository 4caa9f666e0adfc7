"""Lower bounds on the seconds and bytes of a plan's stages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from partc.compilation.plan import ParallelPlan
from partc.cost.forecast import UPDATE
from partc.cost.simulation import Durations, Link, OrderedCompute, in_order
from partc.planner.stage_fitting import range_sums
from partc.planner.tables import Axes, CallTable, RoomTable, ShareTable, Sums, Tables
from partc.schedules import SCHEDULES, Compute, compute_order

Cuts = Sequence[tuple[int, int]]

_MUCH = 1e9  # seconds
_ORDERS = 16  # orders of computations that are kept: one may have 50,000


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
        """For each stage, the seconds until a value of the previous stage has arrived: infinite for the first one. A
        last, infinite entry stands for the end behind the stages.
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
        """A lower bound of the step's seconds: computations run in the order of the schedule, and values that skip
        stages arrive at once.
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
