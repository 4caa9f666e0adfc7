"""A rank's activities and their times: for reports of ranks that hang, for metrics and for traces.

`doing` is always up to date; on a GPU, which runs asynchronously, it is the GPU's activity. Intervals are recorded only
after `start`. They have two levels: the consecutive activities of the rank's program (an action of the schedule, the
update), and inside them every collective and transfer. The time outside collectives and transfers is the rank's own
work.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

Kind = Literal["work", "aside", "collective", "send", "recv", "drain"]
Mark = Any  # nanoseconds of this machine's monotonic clock, or an event of a CUDA stream


class Interval(NamedTuple):
    """An activity of a rank. Times are nanoseconds of its machine's monotonic clock."""

    start: int
    end: int
    kind: Kind  # "work" and "aside" (not part of a step's seconds) belong to the outer level
    name: str  # the action, or the operation
    over: str = ""  # its axes, or its link, as in "link 0 1"
    bytes: int = 0  # of this rank's operand
    within: str = ""  # the action that a collective or transfer is waited for in
    posted: int = 0  # the time at which it was started; the wait for it begins at `start`


class Clock:
    """The clock of one rank. Before `start` it costs two assignments for each activity."""

    def __init__(self) -> None:
        self.step = 0  # the number of the step, from 1; 0 before the first
        self.rows = ""  # a phrase, if more rows than the mean were received for a layer's experts in this step
        self._at = "start-up"
        self._inside = ""
        self._kind: Kind = "aside"
        self._since: Mark = 0
        self._kept: list[tuple[Mark, Mark, Mark, Kind, str, str, int, str]] = []
        self._marks: _Host | _Cuda | None = None
        self._followed: _Followed | None = None

    def follow(self, device: torch.device) -> None:
        """Let `doing` query the device, if its work runs asynchronously."""
        if device.type == "cuda":
            self._followed = _Followed(device)

    @property
    def doing(self) -> str:
        """The current activity in words, with the step. Any thread may call it."""
        host = f"{self._activity}, {self._inside}" if self._inside else self._activity
        behind = self._followed.behind() if self._followed is not None else None
        return host if behind is None else f"{behind} on its GPU (the host is at {host})"

    @property
    def waited(self) -> float:
        """The seconds since the device was last seen to make progress; 0 if it is idle."""
        return 0.0 if self._followed is None else self._followed.waited

    @property
    def _activity(self) -> str:
        return f"{self._at} of step {self.step}" if self.step else self._at

    def entering(self, what: str, kind: Kind = "aside") -> None:
        """Begin the activity `what`."""
        if self._marks is not None:
            now = self._marks.mark()
            self._kept.append((self._since, now, self._since, self._kind, self._at, "", 0, ""))
            self._since = now
        self._at, self._kind = what, kind
        if self._followed is not None:
            self._followed.entering(self._activity)

    def mark(self) -> Mark:
        """The present moment, for `begin` and `end`."""
        return None if self._marks is None else self._marks.mark()

    def begin(self, name: str, over: str) -> Mark:
        """Begin to wait for a collective or transfer; pass the result to `end`."""
        self._inside = f"{name} over {over}"
        return self.mark()

    def end(self, begun: Mark, kind: Kind, name: str, over: str, size: int, posted: Mark = None) -> None:
        """End a collective or transfer that moved `size` bytes of this rank. If it began before `start`, it is not
        recorded.
        """
        self._inside = ""
        if self._marks is not None and begun is not None:
            posted = begun if posted is None else posted
            self._kept.append((begun, self._marks.mark(), posted, kind, name, over, size, self._at))

    def start(self, device: torch.device) -> None:
        """Record intervals from now on."""
        self._marks = _Cuda() if device.type == "cuda" else _Host()
        self._kept.clear()
        self._since = self._marks.mark()

    def stop(self) -> list[Interval]:
        """Stop recording and return all intervals since `start`, in the order of their ends."""
        if self._marks is None:
            return []
        self.entering(self._at, self._kind)
        marks, self._marks = self._marks, None
        times = marks.read([mark for kept in self._kept for mark in kept[:3]])
        each = zip(times[::3], times[1::3], times[2::3], self._kept, strict=True)
        found = [Interval(start, end, *kept[3:], posted=posted) for start, end, posted, kept in each]
        self._kept.clear()
        return found


def machine() -> int:
    """A number that is equal for processes with the same monotonic clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return zlib.crc32(f"{boot} {os.stat('/proc/self/ns/time').st_ino}".encode())
    except OSError:
        return os.getpid() + (1 << 32)


class _Host:
    """The clock for synchronous work, which is done when a call returns. Processes of one machine read the same
    clock.
    """

    def mark(self) -> int:
        return time.monotonic_ns()

    def read(self, marks: Sequence[int]) -> Sequence[int]:
        return marks


class _Cuda:
    """The clock for asynchronous work, in the order of the current stream; the device reports the times.

    A collective runs on its own stream, for which the current one waits: the time between two events on the current
    stream is the time that the rank's own work waited.
    """

    def __init__(self) -> None:
        self._first = self.mark()
        self._first.synchronize()
        self._zero = time.monotonic_ns()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, marks: Sequence[torch.cuda.Event]) -> Sequence[int]:
        self.mark().synchronize()  # this mark comes after all others on the stream
        return [self._zero + round(self._first.elapsed_time(mark) * 1e6) for mark in marks]


class _Followed:
    """The activities that the host has submitted to the device, and those that the device has reached."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reached = "start-up"
        self._ahead: deque[tuple[torch.cuda.Event, str]] = (
            deque()
        )  # the submitted activities; used by the main thread only
        self._seen: tuple[torch.cuda.Event | None, float] = (
            None,
            0.0,
        )  # the next activity at the last query, and the time of that query

    def entering(self, what: str) -> None:
        """Work submitted from now on belongs to this activity."""
        if torch.cuda.is_current_stream_capturing():
            return  # recorded work only runs in replays
        event = torch.cuda.Event()
        event.record()
        self._ahead.append((event, what))
        while self._ahead and self._ahead[0][0].query():
            self._reached = self._ahead.popleft()[1]

    def behind(self) -> str | None:
        """The device's activity, if further ones are queued behind it; else None."""
        reached, ahead = self._reached, self._ahead.copy()
        try:
            with torch.cuda.device(self._device):  # on another device, the calling thread would create a context
                for event, what in ahead:
                    if not event.query():
                        if event is not self._seen[0]:
                            self._seen = event, time.monotonic()
                        return reached
                    reached = what
        except RuntimeError as error:  # the main thread gets the same error and reports it
            return f"{reached}, {str(error).strip().partition(chr(10))[0]},"
        self._seen = None, 0.0
        return None

    @property
    def waited(self) -> float:
        event, since = self._seen
        return 0.0 if event is None else time.monotonic() - since
