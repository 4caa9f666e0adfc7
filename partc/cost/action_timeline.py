"""The timeline of an action: computation in order, collectives beside it.

Collectives over the same axes run one after the other, those over different axes at the same time. A collective runs
beside computation from its start to its wait.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Computation, or a collective (`op`) over some axes with its purpose."""

    seconds: float
    op: str = ""
    over: str = ""
    bytes: int = 0  # of a rank's operand
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSegment:
    """A segment with its start and end, in seconds from its action's start."""

    start: float
    end: float
    segment: Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTimeline:
    """The timeline of an action; collectives that it has started continue for `carried` seconds after its end."""

    seconds: float = 0.0
    pieces: tuple[TimedSegment, ...] = ()
    carried: float = 0.0

    @property
    def compute(self) -> float:
        return sum(piece.segment.seconds for piece in self.pieces if not piece.segment.op)

    @property
    def collectives(self) -> tuple[Segment, ...]:
        """The collectives in the order of their starts."""
        return tuple(piece.segment for piece in self.pieces if piece.segment.op)


class TimelineBuilder:
    """Builds the timeline of an action."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pieces: list[TimedSegment] = []
        self._free: dict[str, float] = {}  # axes -> end of the last collective over them
        self._ends: dict[object, float] = {}

    def work(self, seconds: float) -> None:
        if seconds:
            self.pieces.append(TimedSegment(start=self.now, end=self.now + seconds, segment=Segment(seconds=seconds)))
            self.now += seconds

    def start(self, key: object, segment: Segment) -> None:
        begin = max(self.now, self._free.get(segment.over, 0.0))
        end = self._free[segment.over] = self._ends[key] = begin + segment.seconds
        self.pieces.append(TimedSegment(start=begin, end=end, segment=segment))

    def wait(self, key: object) -> None:
        self.now = max(self.now, self._ends.pop(key, 0.0))

    def built(self) -> ActionTimeline:
        carried = max([0.0, *(end - self.now for end in self._ends.values())])
        return ActionTimeline(seconds=self.now, pieces=tuple(self.pieces), carried=carried)
