"""The search for the best plan, best bound first.

Plans wait in a queue, ordered by their lower bounds. The plan at the head gets its next bound, which is tighter and
takes longer to compute; a plan with all bounds is simulated. The search ends when the best simulated plan is at least
as quick as the bound at the head: no other plan can be quicker. If time runs out before that, the bound at the head
gives the gap.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
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
    seconds: float
    order: tuple[bool, float, int]  # the order of plans with equal seconds
    plan: ParallelPlan | Family = field(compare=False)
    bound: Bound = field(compare=False)
    tighter: tuple[Callable[..., Bound], ...] = field(compare=False)  # further bounds, in order


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
    near: Callable[[ParallelPlan], Iterable[ParallelPlan]] = lambda plan: (),
    variants: Callable[[ParallelPlan], Iterable[ParallelPlan]] = lambda plan: (),
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
    plan may then be the best. `suited` fits the stages of a plan whose bound is at
    the head, if they are not fitted yet; it returns None if the plan should not be compared with others.

    `starts` are tried first, then plans `near` the best one, as long as they are quicker. With `max_seconds`, this
    takes at most half of the time, or all of it while no plan fits. A `patient` search tries `starts` until one fits,
    even if this takes longer. Among equal bounds, plans with the least `hope` and families with the least `promise`
    come first. At the end the `variants` of the best plan, which no family has, are tried as long as one is quicker.
    """
    start = time.perf_counter()
    queue: list[_Waiting] = []
    # Plans whose stages have durations, so that only the schedule may still have to be played.
    promising: list[_Waiting] = []
    count = too_large = 0
    closest: tuple[ParallelPlan, Bound] | None = None
    fitting: list[Played] = []
    others: list[Played] = []
    best = float("inf")

    def wait(
        plan: ParallelPlan,
        bound: Bound,
        order: tuple[bool, float, int],
        tighter: tuple[Callable[[ParallelPlan, Bound], Bound], ...],
    ) -> None:
        nonlocal too_large, closest
        if bound.bytes <= limit:
            waiting = _Waiting(bound.seconds, order, plan, bound, tighter)
            heapq.heappush(queue, waiting)
            if len(tighter) <= _SCHEDULED:
                heapq.heappush(promising, waiting)
            return
        too_large += 1
        if closest is None or bound.bytes < closest[1].bytes:
            closest = plan, bound

    def fits(played: Played) -> bool:
        return played.error is None and played.bytes <= limit

    def play(plan: ParallelPlan, bound: Bound) -> None:
        nonlocal best
        played = Played(plan=plan, bound=bound, prediction=simulated(plan))
        known.add(plan)
        if fits(played):
            fitting.append(played)
            best = min(best, played.seconds)
            if late(_SETTLING):
                settle()
        else:
            others.append(played)

    def settle() -> None:
        """Give the best plan its final prediction, until it stays the best."""
        nonlocal best
        while refined is not None and fitting and (first := min(fitting, key=_rank)).plan not in final:
            played = with_prediction(first, refined(first.plan))
            final.add(first.plan)
            fitting.remove(first)
            (fitting if fits(played) else others).append(played)
        best = min((played.seconds for played in fitting), default=float("inf"))

    def is_open() -> bool:
        """Whether a plan in the queue may be quicker than the best one."""
        if not (queue and best > queue[0].seconds):
            settle()
        return bool(queue) and best > queue[0].seconds

    known: set[ParallelPlan] = set()
    final: set[ParallelPlan] = set()  # plans with final predictions
    tighten = bounds.filled, bounds.summed, bounds.scheduled

    def late(share: float) -> bool:
        return max_seconds is not None and time.perf_counter() - start > share * max_seconds

    def first(plan: ParallelPlan) -> bool:
        """Simulate a plan, unless its bounds show that it is not the best. Returns whether it is the best so far."""
        found = suited(plan)
        if found is None or found in known:
            return False
        plan = found
        before, bound = best, bounds.simple(plan)
        for tighter in (bounds.wide, *tighten, None):
            if bound.bytes > limit or bound.seconds >= best:
                return False
            bound = bound if tighter is None else tighter(plan, bound)
        play(plan, bound)
        return best < before

    def climb(share: float, around: Callable[[ParallelPlan], Iterable[ParallelPlan]]) -> bool:
        """Try the plans around the best one, as long as one of them is quicker, or until that share of the time.

        Returns whether one was quicker.
        """
        before, better = best, bool(fitting)
        while better and not late(share):
            middle = min(fitting, key=lambda played: played.seconds).plan
            better = any(not late(share) and first(plan) for plan in around(middle))
        return best < before

    for number, family in enumerate(families):
        bound = bounds.simple(family.least)
        count += len(family)
        if bound.bytes <= limit:
            order = *promise(family), number
            tighter = (bounds.of_all_orders, bounds.of_family) if ordered else (bounds.of_family,)
            heapq.heappush(queue, _Waiting(bound.seconds, order, family, bound, tighter))
            continue
        too_large += len(family)
        if closest is None or bound.bytes < closest[1].bytes:
            closest = family.least, bound
    reached = queue[0].seconds if queue else best  # no remaining plan is quicker

    def run() -> bool:
        """Search until the best plan is proved. Returns whether it is, rather than that time ran out."""
        nonlocal reached
        for plan in left:
            if not late(_STARTING if fitting else 1.0):
                first(plan)
        climb(_CLIMBING, near)
        share = _CLIMBING
        while is_open():
            reached = queue[0].seconds
            if late(1.0):
                return False
            while promising and late(share) and not late(1.0):
                tried = len(known)
                tried_next = heapq.heappop(promising).plan
                assert isinstance(tried_next, ParallelPlan)
                first(tried_next)
                share += _AGAIN * (len(known) - tried)
            head = heapq.heappop(queue)
            if isinstance(head.plan, Family) and head.tighter:
                following, *rest = head.tighter
                bound = following(head.plan, head.bound, limit)
                heapq.heappush(queue, _Waiting(bound.seconds, head.order, head.plan, bound, tuple(rest)))
            elif isinstance(head.plan, Family):
                for plan in head.plan.plans():
                    bound = bounds.simple(plan)
                    bound = bounds.wide(plan, bound) if bound.bytes <= limit else bound
                    wait(plan, bound, (*hope(plan), 0), tighten)
            elif (found := suited(head.plan)) is not head.plan:
                if found is not None:
                    wait(found, head.bound, head.order, head.tighter)
            elif head.tighter:
                following, *rest = head.tighter
                wait(head.plan, following(head.plan, head.bound), head.order, tuple(rest))
            elif head.plan not in known:
                play(head.plan, head.bound)
        reached = queue[0].seconds if queue else best
        return True

    complete, left = False, iter(starts)
    while patient and not fitting and (plan := next(left, None)) is not None:
        first(plan)
    with suppress(TimeUpError), time_limit(None if max_seconds is None else start + max_seconds - time.perf_counter()):
        complete = run()
        while complete and climb(1.0, variants):
            complete = run()
    settle()
    fitting.sort(key=_rank)
    return Outcome(
        fitting=tuple(fitting),
        others=tuple(others),
        bound=min(best, reached),
        space=count,
        too_large=too_large,
        closest=closest,
        complete=complete,
        seconds=time.perf_counter() - start,
    )
