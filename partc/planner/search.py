"""The search for the best plan, best bound first.

Plans wait in a queue, ordered by their lower bounds. The plan at the head gets its next bound, which is tighter and
takes longer to compute; a plan with all bounds is simulated. The search ends when the best simulated plan is at least
as quick as the bound at the head: no other plan can be quicker. If time runs out before that, the bound at the head
gives the gap.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from partc.compilation.plan import ParallelPlan
from partc.planner.bounds import Bound, Bounds
from partc.planner.deadline import TimeUpError, time_limit
from partc.planner.space import Family

# Shares of the time, after which starts and neighbours, respectively, are no longer tried.
_STARTING, _CLIMBING = 0.3, 0.5
_SCHEDULED = 1  # a promising plan may lack one bound: its schedule's
_SETTLING = 0.9  # share of the time after which each plan that is the best so far gets its final prediction at once
_AGAIN = 0.05  # after each such share of the time, the most promising plan is simulated out of turn
_ROUNDING = 1e-9  # tolerance for seconds that are added up in different orders


class Predicted(Protocol):
    """The simulator's prediction for a plan."""

    @property
    def step_seconds(self) -> float: ...

    @property
    def memory_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A plan that does not compile."""

    error: str
    step_seconds: float = float("inf")
    memory_bytes: int = 0


Simulated = Callable[[ParallelPlan], "Predicted | Failure"]
Around = Callable[[ParallelPlan], Iterable[ParallelPlan]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A simulated plan, with its bound and its prediction."""

    plan: ParallelPlan
    bound: Bound
    prediction: Predicted | Failure

    @property
    def seconds(self) -> float:
        return self.prediction.step_seconds

    @property
    def bytes(self) -> int:
        return self.prediction.memory_bytes

    @property
    def error(self) -> str | None:
        """The reason why it does not compile; None if it does."""
        return self.prediction.error if isinstance(self.prediction, Failure) else None

    @property
    def holds(self) -> bool:
        """Whether the prediction respects the bound."""
        near = self.seconds * (1 + _ROUNDING) >= self.bound.seconds
        return self.error is not None or (near and self.bytes >= self.bound.bytes)


def with_prediction(played: Played, found: Predicted | Failure) -> Played:
    """The plan with the prediction of another program, for which its bound no longer holds."""
    known = played.bound
    bound = Bound(seconds=min(known.seconds, found.step_seconds), bytes=min(known.bytes, found.memory_bytes))
    return Played(plan=played.plan, bound=bound, prediction=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a search: the simulated plans that fit, the best first, and the others.

    `bound` is the least number of seconds that any plan that fits can take.
    """

    fitting: tuple[Played, ...]
    others: tuple[Played, ...]  # plans that hold too much, or do not compile
    bound: float
    space: int
    too_large: int  # plans whose bound on memory is above the limit
    closest: tuple[ParallelPlan, Bound] | None  # the one of these with the least bound on memory
    complete: bool
    seconds: float

    @property
    def best(self) -> Played | None:
        return self.fitting[0] if self.fitting else None

    @property
    def gap(self) -> float:
        """The largest share by which another plan could be quicker than the best one."""
        return max(0.0, 1 - self.bound / self.best.seconds) if self.best else 1.0

    @property
    def wrong(self) -> tuple[Played, ...]:
        """The plans whose predictions violate their bounds. This would be a bug, and would leave the gap unproved."""
        return tuple(played for played in (*self.fitting, *self.others) if not played.holds)


def _rank(played: Played) -> tuple[float, int, int]:
    """The key by which plans are ordered, the best first."""
    return float(f"{played.seconds:.9g}"), len(played.plan.flags), played.bytes


@dataclass(order=True, slots=True)
class _Waiting:
    """A family or a plan in the queue, with its bound and the tighter bounds that it has not got yet, in order."""

    seconds: float
    order: tuple[bool, float, int]  # the order of plans with equal seconds
    plan: ParallelPlan | Family = field(compare=False)
    bound: Bound = field(compare=False)
    tighter: tuple[Callable[..., Bound], ...] = field(compare=False)


def search(
    families: Iterable[Family],
    simulated: Simulated,
    bounds: Bounds,
    *,
    limit: int,
    refined: Simulated | None = None,
    suited: Callable[[ParallelPlan], ParallelPlan | None] = lambda plan: plan,
    starts: Iterable[ParallelPlan] = (),
    ordered: bool = False,
    near: Around = lambda plan: (),
    variants: Around = lambda plan: (),
    hope: Callable[[ParallelPlan], tuple[bool, float]] = lambda plan: (False, 0.0),
    promise: Callable[[Family], tuple[bool, float]] = lambda family: (False, 0.0),
    max_seconds: float | None = None,
    patient: bool = False,
) -> Outcome:
    """The quickest plan that holds at most `limit` bytes, of all families.

    A family's plans get their bounds when the family's own bound is at the head of the queue. With `ordered`, families
    that differ in the place of pp and dp among their axes alone have a common bound first.

    `simulated` predicts with a program that plans of other sizes share; bounds hold for this shared program. `refined`
    gives the final prediction of the best plan, once no other one may be quicker, or the time is nearly up: another
    plan may then be the best. `suited` fits the stages of a plan whose bound is at the head, if they are not fitted
    yet; it returns None if the plan should not be compared with others.

    `starts` are tried first, then plans `near` the best one, as long as they are quicker. With `max_seconds`, this
    takes at most half of the time, or all of it while no plan fits. A `patient` search tries `starts` until one fits,
    even if this takes longer. Among equal bounds, plans with the least `hope` and families with the least `promise`
    come first. At the end the `variants` of the best plan, which no family has, are tried as long as one is quicker.
    """
    state = _PlanSearch(
        simulated=simulated,
        refined=refined,
        bounds=bounds,
        suited=suited,
        hope=hope,
        limit=limit,
        max_seconds=max_seconds,
    )
    state.add_families(families, promise, ordered=ordered)
    left = iter(starts)
    if patient:
        state.try_until_one_fits(left)
    with suppress(TimeUpError), time_limit(state.seconds_left):
        state.try_starts(left)
        better = True
        while better:
            state.climb(_CLIMBING, near)
            state.prove()
            better = state.complete and state.climb(1.0, variants)
    state.settle()
    return state.outcome()


@dataclass(kw_only=True)
class _PlanSearch:
    """The state of a search: the queue of families and plans, and the simulated plans. Its methods are the steps."""

    simulated: Simulated
    refined: Simulated | None
    bounds: Bounds
    suited: Callable[[ParallelPlan], ParallelPlan | None]
    hope: Callable[[ParallelPlan], tuple[bool, float]]
    limit: int
    max_seconds: float | None

    started: float = field(default_factory=lambda: time.perf_counter())
    queue: list[_Waiting] = field(default_factory=list)  # a heap, the least bound first
    # Plans of the queue whose stages have durations, so that only the schedule may still have to be played.
    promising: list[_Waiting] = field(default_factory=list)
    fitting: list[Played] = field(default_factory=list)
    others: list[Played] = field(default_factory=list)
    known: set[ParallelPlan] = field(default_factory=set)  # the simulated plans
    final: set[ParallelPlan] = field(default_factory=set)  # the plans with final predictions
    best: float = math.inf  # the seconds of the best plan that fits
    reached: float = math.inf  # no plan in the queue is quicker
    share: float = _CLIMBING  # of the time, after which the next promising plan is tried out of turn
    complete: bool = False  # whether no plan in the queue is quicker than the best one
    space: int = 0
    too_large: int = 0
    closest: tuple[ParallelPlan, Bound] | None = None

    # -- time -----------------------------------------------------------------------------------

    def late(self, share: float) -> bool:
        """Whether that share of the time has passed."""
        return self.max_seconds is not None and time.perf_counter() - self.started > share * self.max_seconds

    @property
    def seconds_left(self) -> float | None:
        return None if self.max_seconds is None else self.started + self.max_seconds - time.perf_counter()

    # -- steps of the search --------------------------------------------------------------------

    def add_families(
        self, families: Iterable[Family], promise: Callable[[Family], tuple[bool, float]], *, ordered: bool
    ) -> None:
        """Put all families into the queue with their first bounds, except those whose plans are all too large."""
        tighter = (self.bounds.of_all_orders, self.bounds.of_family) if ordered else (self.bounds.of_family,)
        for number, family in enumerate(families):
            self.space += len(family)
            bound = self.bounds.simple(family.least)
            if bound.bytes <= self.limit:
                self._wait(family, bound, (*promise(family), number), tighter)
            else:
                self._leave_out(family.least, bound, len(family))
        self.reached = self.queue[0].seconds if self.queue else self.best

    def try_until_one_fits(self, starts: Iterator[ParallelPlan]) -> None:
        """Try plans, however long this takes, until one fits."""
        while not self.fitting and (plan := next(starts, None)) is not None:
            self._improves(plan)

    def try_starts(self, starts: Iterator[ParallelPlan]) -> None:
        """Try plans for a share of the time, or for all of it while none fits."""
        for plan in starts:
            if not self.late(_STARTING if self.fitting else 1.0):
                self._improves(plan)

    def climb(self, share: float, around: Around) -> bool:
        """Try the plans around the best one, as long as one of them is quicker, or until that share of the time.

        Returns whether one was quicker.
        """
        before, better = self.best, bool(self.fitting)
        while better and not self.late(share):
            middle = min(self.fitting, key=lambda played: played.seconds).plan
            better = any(not self.late(share) and self._improves(plan) for plan in around(middle))
        return self.best < before

    def prove(self) -> None:
        """Take families and plans from the queue until none can be quicker than the best plan, or time is up."""
        self.complete = False
        while self._is_open():
            self.reached = self.queue[0].seconds
            if self.late(1.0):
                return
            self._try_promising()
            self._advance(heapq.heappop(self.queue))
        self.reached = self.queue[0].seconds if self.queue else self.best
        self.complete = True

    def settle(self) -> None:
        """Give the best plan its final prediction, until it stays the best."""
        while self.refined is not None and self.fitting:
            first = min(self.fitting, key=_rank)
            if first.plan in self.final:
                break
            played = with_prediction(first, self.refined(first.plan))
            self.final.add(first.plan)
            self.fitting.remove(first)
            (self.fitting if self._fits(played) else self.others).append(played)
        self.best = min((played.seconds for played in self.fitting), default=math.inf)

    def outcome(self) -> Outcome:
        return Outcome(
            fitting=tuple(sorted(self.fitting, key=_rank)),
            others=tuple(self.others),
            bound=min(self.best, self.reached),
            space=self.space,
            too_large=self.too_large,
            closest=self.closest,
            complete=self.complete,
            seconds=time.perf_counter() - self.started,
        )

    # -- the queue ------------------------------------------------------------------------------

    def _wait(
        self,
        plan: ParallelPlan | Family,
        bound: Bound,
        order: tuple[bool, float, int],
        tighter: tuple[Callable[..., Bound], ...],
    ) -> None:
        waiting = _Waiting(bound.seconds, order, plan, bound, tighter)
        heapq.heappush(self.queue, waiting)
        if len(tighter) <= _SCHEDULED and not isinstance(plan, Family):
            heapq.heappush(self.promising, waiting)

    def _leave_out(self, plan: ParallelPlan, bound: Bound, count: int = 1) -> None:
        """Count plans that hold too much; `plan` holds the least of them."""
        self.too_large += count
        if self.closest is None or bound.bytes < self.closest[1].bytes:
            self.closest = plan, bound

    def _wait_if_it_fits(
        self,
        plan: ParallelPlan,
        bound: Bound,
        order: tuple[bool, float, int],
        tighter: tuple[Callable[..., Bound], ...],
    ) -> None:
        if bound.bytes <= self.limit:
            self._wait(plan, bound, order, tighter)
        else:
            self._leave_out(plan, bound)

    def _is_open(self) -> bool:
        """Whether a plan in the queue may be quicker than the best one."""
        if not (self.queue and self.best > self.queue[0].seconds):
            self.settle()
        return bool(self.queue) and self.best > self.queue[0].seconds

    def _advance(self, head: _Waiting) -> None:
        """Give the head of the queue its next bound; without a further one, replace a family by its plans, and
        simulate a plan.
        """
        plan, bound, order = head.plan, head.bound, head.order
        following, rest = head.tighter[0] if head.tighter else None, head.tighter[1:]
        if isinstance(plan, Family):
            if following is not None:
                self._wait(plan, following(plan, bound, self.limit), order, rest)
            else:
                self._add_plans(plan)
        elif (found := self.suited(plan)) is not plan:
            if found is not None:
                self._wait_if_it_fits(found, bound, order, head.tighter)
        elif following is not None:
            self._wait_if_it_fits(plan, following(plan, bound), order, rest)
        elif plan not in self.known:
            self._simulate(plan, bound)

    def _add_plans(self, family: Family) -> None:
        """Put the plans of a family into the queue."""
        for plan in family.plans():
            bound = self.bounds.simple(plan)
            if bound.bytes <= self.limit:
                bound = self.bounds.wide(plan, bound)
            self._wait_if_it_fits(plan, bound, (*self.hope(plan), 0), self._tighter)

    @property
    def _tighter(self) -> tuple[Callable[[ParallelPlan, Bound], Bound], ...]:
        """The bounds of a plan after the first two."""
        return self.bounds.filled, self.bounds.summed, self.bounds.scheduled

    # -- single plans ---------------------------------------------------------------------------

    def _try_promising(self) -> None:
        """Simulate the most promising plan out of turn, after each further share of the time."""
        while self.promising and self.late(self.share) and not self.late(1.0):
            tried = len(self.known)
            plan = heapq.heappop(self.promising).plan
            assert isinstance(plan, ParallelPlan)
            self._improves(plan)
            self.share += _AGAIN * (len(self.known) - tried)

    def _improves(self, plan: ParallelPlan) -> bool:
        """Simulate a plan, unless its bounds show that it is not the best. Returns whether it is the best so far."""
        found = self.suited(plan)
        if found is None or found in self.known:
            return False
        before, bound = self.best, self.bounds.simple(found)
        for tighter in (self.bounds.wide, *self._tighter, None):
            if bound.bytes > self.limit or bound.seconds >= self.best:
                return False
            bound = bound if tighter is None else tighter(found, bound)
        self._simulate(found, bound)
        return self.best < before

    def _simulate(self, plan: ParallelPlan, bound: Bound) -> None:
        played = Played(plan=plan, bound=bound, prediction=self.simulated(plan))
        self.known.add(plan)
        if self._fits(played):
            self.fitting.append(played)
            self.best = min(self.best, played.seconds)
            if self.late(_SETTLING):
                self.settle()
        else:
            self.others.append(played)

    def _fits(self, played: Played) -> bool:
        return played.error is None and played.bytes <= self.limit
