"""A simulation of a schedule with given durations: the time of each computation, idle time, activations in flight.

    2 ranks, 3 microbatches, 1f1b, backwards twice as long as forwards:

    time   0     1     2     3     4     5     6     7     8     9     10    11    12
    0      [0F0 ][0F1 ]      [   0B0    ][0F2 ][   0B1    ]      [   0B2    ]
    1            [1F0 ][   1B0    ][1F1 ][   1B1    ][1F2 ][   1B2    ]

A rank runs its actions in order. A forward pass waits for the values that it reads from other stages; a backward pass
waits for their gradients. Sends and receives do not block; a transfer begins when both ends are ready and the previous
transfer on the same link has ended. The simulation also detects schedules that deadlock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from partc.errors import InternalError, PartcError
from partc.ir.program import Action, Program
from partc.schedules import Compute

Play = Callable[[int, "Action | Compute", float], float]  # rank, action, its start -> its seconds
Key = tuple[int, str, "int | None"]  # identifies a value: its stage, F or B, and the microbatch
Link = tuple[int, int, bool]  # a stage that produces a value, a later one that reads it, whether a gradient returns


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """The durations of a stage's computations, in forward passes by default; I and W take as long as F."""

    forward: float = 1.0
    backward: float = 2.0
    inputs: float = 1.0
    weights: float = 1.0
    reduction: float = 0.0  # of gradients over ranks, after the last microbatch
    transfer: float = 0.0  # seconds from a computation's end until its result has arrived on another rank

    @classmethod
    def parse(cls, text: str) -> Durations:
        """Parse `F=1,I=1.2,W=0.8,comm=0.1`. B defaults to I + W, comm to 0, everything else to 1.

        Raises PartcError P0412.
        """
        given = {"F": 1.0, "I": 1.0, "W": 1.0, "comm": 0.0}
        for part in text.split(","):
            key, _, number = (word.strip() for word in part.partition("="))
            try:
                value = float(number)
            except ValueError:
                value = math.nan
            if key not in (*given, "B") or not 0 <= value < math.inf or (key == "F" and not value):
                raise PartcError(
                    "P0412", f"{part.strip()!r} is not a duration", help="for example F=1,B=2,I=1,W=1,comm=0.1"
                )
            given[key] = value
        return cls(
            forward=given["F"],
            backward=given.get("B", given["I"] + given["W"]),
            inputs=given["I"],
            weights=given["W"],
            transfer=given["comm"],
        )

    def __str__(self) -> str:
        named = {"F": self.forward, "B": self.backward, "I": self.inputs, "W": self.weights, "comm": self.transfer}
        return ",".join(f"{key}={value:g}" for key, value in named.items())

    def shared(self, part: float) -> Durations:
        """The durations of a stage with this share of the work; the duration of transfers stays."""
        return Durations(
            forward=part * self.forward,
            backward=part * self.backward,
            inputs=part * self.inputs,
            weights=part * self.weights,
            reduction=self.reduction,
            transfer=self.transfer,
        )

    def of(self, kind: str) -> float:
        """The duration of an action; actions without computation take no time."""
        known = {"F": self.forward, "B": self.backward, "I": self.inputs, "W": self.weights}
        return known.get(kind, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSpan:
    """A computation with its start and end."""

    compute: Compute
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A schedule in time: the computations of every pipeline rank, and the actions at which ranks deadlock."""

    ranks: tuple[tuple[ComputeSpan, ...], ...]
    reductions: tuple[tuple[tuple[int, float, float], ...], ...] = ()  # by rank: stage, start, end
    stuck: tuple[tuple[int, int], ...] = ()  # rank, index of its action

    @property
    def makespan(self) -> float:
        """The end of the last computation."""
        return max((span.end for line in self.ranks for span in line), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """The time in which each rank computes."""
        return tuple(sum(span.end - span.start for span in line) for line in self.ranks)

    @property
    def bubble(self) -> float:
        """The share of the step in which a rank is idle, on average."""
        length = self.makespan * len(self.ranks)
        return 1 - sum(self.busy) / length if length else 0.0

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For each rank, the largest number of forward passes whose activations it holds, from F to the end of B or
        W.
        """
        peaks = []
        for line in self.ranks:
            held = peak = 0
            for span in line:
                held += span.compute.kind == "F"
                peak = max(peak, held)
                held -= span.compute.kind in "BW"
            peaks.append(peak)
        return tuple(peaks)


def chain(stages: int) -> tuple[Link, ...]:
    """The links of a chain: every stage reads from the one before it."""
    return tuple((stage, stage + 1, True) for stage in range(stages - 1))


def simulate(
    rows: Sequence[Sequence[Action | Compute]],
    places: Sequence[int],
    *,
    durations: Durations | Sequence[Durations] = Durations(),
    links: Sequence[Link] | None = None,
    play: Play | None = None,
    transfers: Mapping[tuple[int, int], float] = {},
) -> Timeline:
    """Simulate the rows, one for each pipeline rank; `places` holds the rank of every stage.

    `durations` are common to all stages, or one for each stage. `play` replaces them by the duration of each single
    action, except for transfers. `transfers` has the seconds from one stage to another, where they differ from the
    sending stage's own. `links` are the values that stages read from each other, by default a chain. If the rows
    contain sends and receives, values leave and arrive when these are reached; otherwise values travel as soon as they
    are computed.
    """
    each = [durations] * len(places) if isinstance(durations, Durations) else durations
    state = _Simulation(rows, places, each, chain(len(places)) if links is None else links, play, transfers)
    while state.able:
        state.advance(state.able.popleft())
    stuck = tuple((rank, at) for rank, at in enumerate(state.position) if at < len(rows[rank]))
    return Timeline(ranks=tuple(map(tuple, state.spans)), reductions=tuple(map(tuple, state.reductions)), stuck=stuck)


@dataclass(frozen=True, slots=True)
class OrderedCompute:
    """A computation of a rank. `reads` has the positions of the computations whose results it reads, each with its
    stage, or None if this stage is on the same rank.
    """

    rank: int
    stage: int
    kind: str
    reads: tuple[tuple[int, int | None], ...]


def in_order(
    rows: Sequence[Sequence[Compute]], places: Sequence[int], links: Sequence[Link]
) -> tuple[OrderedCompute, ...]:
    """The computations of all ranks in an order that does not depend on durations: each follows those that it waits
    for.
    """
    run: list[tuple[int, Action | Compute]] = []

    def play(rank: int, action: Action | Compute, start: float) -> float:
        run.append((rank, action))
        return 0.0

    simulate(rows, places, links=links, play=play)
    sources, made = _sources(links), dict[Key, int]()
    found = []
    for position, (rank, each) in enumerate(run):
        reads: list[tuple[int, int | None]] = []
        if each.kind != "W":  # the rest of a backward pass reads and makes nothing for other stages
            result = "F" if each.kind == "F" else "B"
            for source in sources[result].get(each.stage, ()):
                reads.append((made[source, result, each.microbatch], None if places[source] == rank else source))
            made[each.stage, result, each.microbatch] = position
        found.append(OrderedCompute(rank, each.stage, each.kind, tuple(reads)))
    return tuple(found)


def timeline(
    program: Program,
    durations: Durations | Sequence[Durations] = Durations(),
    play: Play | None = None,
    transfers: Mapping[tuple[int, int], float] = {},
) -> Timeline:
    """The predicted step of a scheduled program. Raises InternalError if its schedule deadlocks."""
    links = [(transfer.source, transfer.target, transfer.gradient) for transfer in program.transfers]
    places = {action.stage: rank for rank, row in enumerate(program.schedule) for action in row}
    found = simulate(
        program.schedule,
        [places[stage] for stage in range(program.stages)],
        durations=durations,
        links=links,
        play=play,
        transfers=transfers,
    )
    if found.stuck:
        raise InternalError(
            f"the schedule waits forever at {', '.join(str(program.schedule[rank][at]) for rank, at in found.stuck)}"
        )
    return found


class _Simulation:
    """The state of a simulation: the position of every rank, and the values computed and sent."""

    def __init__(
        self,
        rows: Sequence[Sequence[Action | Compute]],
        places: Sequence[int],
        durations: Sequence[Durations],
        links: Sequence[Link],
        play: Play | None,
        transfers: Mapping[tuple[int, int], float],
    ) -> None:
        self.transfers = transfers
        self.rows = rows
        self.play = play
        self.places = places
        self.durations = durations
        self.position = [0] * len(rows)
        self.clock = [0.0] * len(rows)
        self.spans: list[list[ComputeSpan]] = [[] for _ in rows]
        self.reductions: list[list[tuple[int, float, float]]] = [[] for _ in rows]
        self.made: dict[Key, float] = {}  # -> end
        self.sent: dict[Key, float] = {}
        self.free: dict[tuple[int, int], float] = {}  # from rank, to rank -> the end of the last message
        self.posted: dict[Key, float] = {}  # by the stage that receives
        self.able = deque(range(len(rows)))  # ranks that can advance
        self.waiting: dict[Key, list[int]] = {}  # ranks, by the value that they wait for
        self.sends = {(a.stage, a.kind[-1], a.microbatch) for row in rows for a in row if a.kind.startswith("SEND")}
        self.reads = _sources(links)

    def advance(self, rank: int) -> None:
        """Run a rank until it waits."""
        row = self.rows[rank]
        while self.position[rank] < len(row) and self._run(rank, row[self.position[rank]]):
            self.position[rank] += 1

    def _arrive(self, known: dict[Key, float], key: Key, end: float) -> None:
        """Record that a value has been computed or sent, and wake the ranks that wait for it."""
        known[key] = end
        if key in self.waiting:
            self.able.extend(self.waiting.pop(key))

    def _run(self, rank: int, action: Action | Compute) -> bool:
        kind, stage, index = action.kind, action.stage, action.microbatch
        what = "B" if kind == "I" else kind[-1]
        if kind in ("RECV_F", "RECV_B"):
            self.posted[stage, what, index] = self.clock[rank]
        if kind in ("F", "B", "I"):
            if kind in ("B", "I") and (stage, "F", index) not in self.made:
                return False
            ready = self._ready(rank, stage, what, index)
            if ready is None:
                return False
            self.clock[rank] = max(self.clock[rank], ready)
        if kind in ("SEND_F", "SEND_B"):
            if (stage, what, index) not in self.made:
                return False
            self._arrive(self.sent, (stage, what, index), self.clock[rank])
        if kind == "W" and (stage, "B", index) not in self.made:
            return False
        if kind == "REDUCE_GRAD":
            start = self.clock[rank]
            self.clock[rank] = start + self._duration(rank, action, start)
            self.reductions[rank].append((stage, start, self.clock[rank]))
        if kind in ("F", "B", "I", "W") and index is not None:
            start = self.clock[rank]
            self.clock[rank] = end = start + self._duration(rank, action, start)
            compute = action if isinstance(action, Compute) else Compute(stage, kind, index)
            self.spans[rank].append(ComputeSpan(compute=compute, start=start, end=end))
            self._arrive(self.made, (stage, what, index), end)
        return True

    def _duration(self, rank: int, action: Action | Compute, start: float) -> float:
        if self.play is not None:
            return self.play(rank, action, start)
        durations = self.durations[action.stage]
        return durations.reduction if action.kind == "REDUCE_GRAD" else durations.of(action.kind)

    def _ready(self, rank: int, stage: int, what: str, index: int | None) -> float | None:
        """The time from which all inputs of a computation are present; None while one of them has not been computed."""
        latest, coming = 0.0, list[tuple[int, float, float]]()  # from rank, when both ends are ready, seconds
        posted = self.posted.get((stage, what, index), 0.0)
        for other in self.reads[what].get(stage, ()):
            key = (other, what, index)
            here = self.places[other] == rank
            known = self.made if here or key not in self.sends else self.sent
            if key not in known:
                self.waiting.setdefault(key, []).append(rank)
                return None
            if here:
                latest = max(latest, known[key])
                continue
            begin = max(known[key], posted)
            takes = self.transfers.get((other, stage), self.durations[other].transfer)
            if known is self.sent:
                coming.append((self.places[other], begin, takes))
            latest = max(latest, begin + takes)
        for source, begin, takes in coming:  # messages over one link follow each other
            self.free[source, rank] = max(begin, self.free.get((source, rank), 0.0)) + takes
            latest = max(latest, self.free[source, rank])
        return latest


def _sources(links: Sequence[Link]) -> Mapping[str, Mapping[int, Sequence[int]]]:
    """For forward and backward passes of each stage, the stages whose results they read."""
    found: dict[str, dict[int, list[int]]] = {"F": {}, "B": {}}
    for source, target, gradient in links:
        found["F"].setdefault(target, []).append(source)
        if gradient:
            found["B"].setdefault(source, []).append(target)
    return found
