"""The best plans for similar requests, with other memory, ranks or batches: they show the price of each constraint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from partc.cluster.cluster import Cluster, resized
from partc.errors import PartcError
from partc.ir.printer import readable
from partc.planner.planning import PlanChoice, Planner, Request
from partc.planner.search import Played

Change = Literal["memory", "ranks", "batch", "decisions"]
MEMORY = 1.1  # as a share of the limit: the search that gives the price of memory
_LEAST = 0.5  # seconds of a search
_WAYS = 3  # the most ways of making a plan fit that are named
_FRONT = 8  # the most plans of a front
_STEP = 0.9  # share of a plan's memory that the next plan of a front may hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """A request that differs from the user's in one way; and its best plan, or the reason why there is none."""

    name: str
    change: Change
    ranks: int
    batch: int
    limit: int
    best: Played | None
    gap: float = 0.0
    error: str = ""

    @property
    def rate(self) -> float:
        """Samples a second."""
        return 0.0 if self.best is None else self.batch / self.best.seconds


class Budget:
    """The seconds that several searches share: each gets an equal part of the remainder."""

    def __init__(self, seconds: float | None, searches: int) -> None:
        self._end = None if seconds is None else time.perf_counter() + seconds
        self._searches = searches

    def take(self) -> float | None:
        """The seconds of the next search; 0 if none are left."""
        self._searches -= 1
        if self._end is None:
            return None
        left = self._end - time.perf_counter()
        return max(left / (1 + max(0, self._searches)), _LEAST) if left > 0 else 0.0


def required_choice(planner: Planner) -> PlanChoice:
    """The choice of a planner. Raises PartcError P0813 if no plan fits; the error names similar requests that would
    fit.
    """
    start = time.perf_counter()
    choice = planner.choice()
    if choice.outcome.best is not None:
        return choice
    error = choice.nothing_fits()
    limit = planner.request.max_seconds
    ways: list[str] = []
    for name, change, request in (*_decided(planner), *_larger(planner), *_smaller(planner)):
        seconds = None if limit is None else (limit - (time.perf_counter() - start)) / 2
        if len(ways) == _WAYS or (seconds is not None and seconds < _LEAST):
            break
        found = _variation(planner, name, change, request, seconds)
        if found.best is not None:
            ways.append(f"{name}: {found.best.plan.flags}")
    if not ways:
        raise error
    raise PartcError(error.code, error.cause, help=f"this fits: {'; '.join(ways)}")


def variations(planner: Planner, choice: PlanChoice, seconds: float | None) -> tuple[Variation, ...]:
    """The best plans with more memory, with CUDA graphs, with fewer and more ranks, and with smaller and larger
    batches.
    """
    wanted = [
        *_looser(planner, choice),
        *_recorded(planner),
        *_fewer_ranks(planner),
        *_larger(planner),
        *_smaller(planner),
        (f"twice the batch, {2 * choice.space.batch:,}", "batch", _with_batch(planner, 2 * choice.space.batch)),
    ]
    return tuple(_searched_variations(planner, wanted, seconds))


def price(planner: Planner, choice: PlanChoice) -> Variation:
    """The best plan with 10% more memory than the choice had, which shows the price of memory."""
    return next(_searched_variations(planner, [*_looser(planner, choice)], planner.request.max_seconds))


def front(planner: Planner, choice: PlanChoice, seconds: float | None) -> tuple[Played, ...]:
    """The quickest plans for less and less memory, each found by a separate search."""
    found = [choice.best]
    budget = Budget(seconds, _FRONT)
    while len(found) < _FRONT:
        limit = int(_STEP * found[-1].bytes)
        each = budget.take()
        if each == 0.0:
            break
        best = planner.choice(limit=limit, max_seconds=each).outcome.best
        if best is None:
            break
        found.append(best)
    return tuple(found)


_Wanted = tuple[str, Change, Request]


def _searched_variations(planner: Planner, wanted: Sequence[_Wanted], seconds: float | None) -> Iterator[Variation]:
    budget = Budget(seconds, len(wanted))
    for name, change, request in wanted:
        yield _variation(planner, name, change, request, budget.take())


def _variation(planner: Planner, name: str, change: Change, request: Request, seconds: float | None) -> Variation:
    batch = planner.space.batch
    kept = {"name": name, "change": change, "ranks": request.ranks, "limit": request.limit}
    if change == "batch":
        batch = int(str(request.options["batch"]))
    if seconds == 0.0:
        return Variation(**kept, batch=batch, best=None, error="no time was left")  # type: ignore[arg-type]
    try:
        if change == "memory":
            outcome = planner.choice(limit=request.limit, max_seconds=seconds).outcome
        else:
            outcome = Planner(request, planner.simulator).choice(max_seconds=seconds).outcome
    except PartcError as error:
        return Variation(**kept, batch=batch, best=None, error=error.cause)  # type: ignore[arg-type]
    why = "" if outcome.best is not None else "nothing fits" if outcome.complete else "nothing that fits was found"
    return Variation(**kept, batch=batch, best=outcome.best, gap=outcome.gap, error=why)  # type: ignore[arg-type]


def _decided(planner: Planner) -> Iterator[_Wanted]:
    kept = planner.request.kept or {}
    if planner.request.fixed != kept:
        yield "without --fix", "decisions", replace(planner.request, fixed=kept)


def _recorded(planner: Planner) -> Iterator[_Wanted]:
    request = planner.request
    if request.cluster.device.kind == "gpu" and not request.cuda_graphs:
        yield "with --cuda-graphs", "decisions", replace(request, cuda_graphs=True)


def _looser(planner: Planner, choice: PlanChoice) -> Iterator[_Wanted]:
    memory = int(MEMORY * choice.request.limit)
    yield f"10% more memory, {readable(memory)}", "memory", replace(planner.request, limit=memory)


def _fewer_ranks(planner: Planner) -> Iterator[_Wanted]:
    ranks = planner.request.ranks
    for part, word in ((4, "a quarter"), (2, "half")):
        if ranks % part == 0:
            yield f"{word} of the ranks, {ranks // part:,}", "ranks", _with_ranks(planner, ranks // part)


def _larger(planner: Planner) -> Iterator[_Wanted]:
    ranks, devices = planner.request.ranks, planner.request.cluster.devices
    if ranks % devices == 0 and ranks > devices:
        yield f"one more node, {ranks + devices:,} ranks", "ranks", _with_ranks(planner, ranks + devices)
    for times, word in ((2, "twice"), (4, "four times")):
        yield f"{word} the ranks, {times * ranks:,}", "ranks", _with_ranks(planner, times * ranks)


def _smaller(planner: Planner) -> Iterator[_Wanted]:
    batch = planner.space.batch
    if batch % 2 == 0 and planner.request.kept is None:
        yield f"half the batch, {batch // 2:,}", "batch", _with_batch(planner, batch // 2)


def _with_ranks(planner: Planner, ranks: int) -> Request:
    cluster = planner.request.cluster
    return replace(planner.request, ranks=ranks, cluster=_room(cluster, ranks))


def _room(cluster: Cluster, ranks: int) -> Cluster:
    """The cluster with as many nodes as the ranks need, if its network can have that many."""
    if ranks <= cluster.size or cluster.topology.kind in ("torus", "hypercube"):
        return cluster
    return resized(cluster, -(-ranks // cluster.devices))


def _with_batch(planner: Planner, batch: int) -> Request:
    request = planner.request
    return replace(request, options={**request.options, "batch": batch}, global_batch=None)
