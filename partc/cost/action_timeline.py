"""The timeline of an action: computation in order, collectives concurrent with it.

Collectives over the same axes run one after the other; collectives over different axes run concurrently, and share the
bandwidth of the links that they have in common. A collective overlaps with the computation between its start and its
wait; while both run, each slows the other down. Its end is delayed by the lag that its slowest rank has accumulated
since the group's previous collective.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

_ENDED = 1e-15  # remaining seconds of a collective that has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of computation, or a collective (`op`) over some axes and its purpose."""

    seconds: float
    op: str = ""
    over: str = ""
    bytes: int = 0  # of one rank's operand
    why: str = ""
    links: tuple[str, ...] = ()  # the links that a collective's messages use
    lag: float = 0.0  # seconds by which the slowest rank is late after one second of computation


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSegment:
    """A segment with its start and end, in seconds from its action's start, and the name of its call, if it has one."""

    start: float
    end: float
    segment: Segment
    call: str = ""

    @property
    def why(self) -> str:
        """The purpose of a collective."""
        return f"{self.call}: {self.segment.why}" if self.call else self.segment.why


@dataclass(frozen=True, slots=True)
class LeftCollective:
    """A collective that is still running when its action ends: the key of its wait, and its remaining seconds."""

    key: object
    segment: Segment
    left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTimeline:
    """The timeline of an action; `pending` collectives continue for `carried` seconds after its end."""

    seconds: float = 0.0
    pieces: tuple[TimedSegment, ...] = ()
    carried: float = 0.0
    pending: tuple[LeftCollective, ...] = ()
    # A collective with its axes, and the seconds for which the rank waits for it.
    waited: tuple[tuple[str, float], ...] = ()

    @property
    def compute(self) -> float:
        return sum(piece.segment.seconds for piece in self.pieces if not piece.segment.op)

    @property
    def collectives(self) -> tuple[TimedSegment, ...]:
        """The collectives, in the order in which they start."""
        return tuple(piece for piece in self.pieces if piece.segment.op)


@dataclass(slots=True, eq=False)
class _Running:
    """A collective that has started: its remaining seconds, and the time at which its links were free for it."""

    key: object
    segment: Segment
    left: float
    begun: float
    place: int | None  # its position among the pieces; None if an earlier action started it
    call: str = ""


class TimelineBuilder:
    """Builds the timeline of an action. Concurrent computation and collectives slow each other down."""

    def __init__(
        self, slowdown: float = 0.0, pending: Iterable[LeftCollective] = (), idle: float = 0.0, pace: float = 1.0
    ) -> None:
        """`pending` collectives were running `idle` seconds before the action starts.

        Computation takes `pace` times as long as it does on a core of its own.
        """
        self.pace = pace
        self.now = 0.0
        self._pieces: list[TimedSegment | None] = []
        self.waited: dict[str, float] = {}  # collective and its axes -> seconds without computation
        self._stretch = 1 + slowdown
        self._computed = 0.0  # seconds
        self._met: dict[str, float] = {}  # axes -> the seconds of computation before the last collective over them
        self._queues: dict[str, deque[_Running]] = {}  # axes -> collectives over them, one after the other
        for each in pending:
            running = _Running(key=each.key, segment=each.segment, left=each.left, begun=0.0, place=None)
            self._queues.setdefault(each.segment.over, deque()).append(running)
        self._sharing = self._shared()
        while idle > 0 and self._queues:
            step = min(idle, self._seconds_to_first_end())
            self._pass(step, step)
            idle -= step
        self.now = 0.0

    def work(self, seconds: float) -> None:
        if not seconds:
            return
        begin, left = self.now, seconds * self.pace
        while left > 0:
            stretch = self._stretch if self._queues else 1.0
            step = min(left, self._seconds_to_first_end())
            self._pass(step * stretch, step)
            left -= step
        self._computed += self.now - begin
        self._pieces.append(TimedSegment(start=begin, end=self.now, segment=Segment(seconds=self.now - begin)))

    def start(self, key: object, segment: Segment, call: str = "") -> None:
        queue = self._queues.setdefault(segment.over, deque())
        place = len(self._pieces)
        self._pieces.append(None)
        # The durations of pieces of computation vary independently, so that the variance of their sum grows with time.
        lag = segment.lag * math.sqrt(self._computed - self._met.get(segment.over, 0.0))
        self._met[segment.over] = self._computed
        left = segment.seconds + lag
        queue.append(_Running(key=key, segment=segment, left=left, begun=self.now, place=place, call=call))
        if len(queue) == 1:
            self._sharing = self._shared()

    def wait(self, key: object) -> None:
        """Wait for all collectives with this key."""
        for found in [each for queue in self._queues.values() for each in queue if each.key == key]:
            begin = self.now
            while found in self._queues.get(found.segment.over, ()):
                first = self._seconds_to_first_end()
                self._pass(first, first)
            if self.now > begin:
                name = f"{found.segment.op} over {found.segment.over}"
                self.waited[name] = self.waited.get(name, 0.0) + self.now - begin

    @property
    def is_quiet(self) -> bool:
        """Whether no collective runs."""
        return not self._queues

    def append(self, call: str, alone: ActionTimeline) -> None:
        """Append a call's own timeline, if neither this one nor the call leaves collectives that run. Its collectives
        have no lag.
        """
        for each in alone.pieces:
            start, end = self.now + each.start, self.now + each.end
            self._pieces.append(TimedSegment(start=start, end=end, segment=each.segment, call=call))
        for name, seconds in alone.waited:
            self.waited[name] = self.waited.get(name, 0.0) + seconds
        self.now += alone.seconds
        self._computed += alone.compute

    def _seconds_to_first_end(self) -> float:
        """The seconds until the first collective ends, if no computation runs concurrently."""
        return min((queue[0].left * self._sharing[over] for over, queue in self._queues.items()), default=math.inf)

    def _shared(self) -> Mapping[str, int]:
        """For the first collective of each queue, the number of these on the busiest link that it uses."""
        if len(self._queues) < 2:
            return dict.fromkeys(self._queues, 1)
        links = {over: queue[0].segment.links for over, queue in self._queues.items()}
        users = Counter(chain.from_iterable(map(frozenset, links.values())))
        return {over: max(map(users.__getitem__, own), default=1) for over, own in links.items()}

    def _pass(self, seconds: float, done: float) -> None:
        """Let `seconds` pass, in which a collective that shares no link advances by `done` seconds."""
        self.now += seconds
        ended = []
        for over, queue in self._queues.items():
            queue[0].left -= done / self._sharing[over]
            if queue[0].left <= _ENDED:
                ended.append(over)
        for over in ended:
            queue = self._queues[over]
            first = queue.popleft()
            if first.place is not None:
                self._pieces[first.place] = TimedSegment(
                    start=first.begun, end=self.now, segment=first.segment, call=first.call
                )
            if queue:
                queue[0].begun = self.now
            else:
                del self._queues[over]
        if ended:
            self._sharing = self._shared()

    def built(self) -> ActionTimeline:
        carried = 0.0
        for queue in self._queues.values():
            at = self.now
            for each in queue:
                begun = each.begun if at == self.now else at
                at += each.left
                if each.place is not None:
                    self._pieces[each.place] = TimedSegment(start=begun, end=at, segment=each.segment, call=each.call)
            carried = max(carried, at - self.now)
        return ActionTimeline(
            seconds=self.now,
            pieces=tuple(piece for piece in self._pieces if piece is not None),
            carried=carried,
            pending=tuple(
                LeftCollective(each.key, each.segment, each.left) for queue in self._queues.values() for each in queue
            ),
            waited=tuple(self.waited.items()),
        )
