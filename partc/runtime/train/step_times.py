"""The split of a step's seconds: a rank's own work, communication that it waits for, and the pipeline's bubble.

`compute` is a rank's own work. `exposed_communication` is the time that it waits in collectives (also for slower
ranks), for transfers in progress, and for its own sends to finish. `bubble` is the time that it waits in receives for a
pipeline peer that has not sent yet. Each is the mean over all ranks, so that they add up to the step.

The lateness of a peer is measured without a common clock. After each step every rank reports to its pipeline peers when
it sent. Processes on one machine share a clock. For others the offset is half of the difference between the quickest
transfers there and back, as in the Network Time Protocol (Mills 1991, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..clock import Interval, machine
from ..comm.comm import Comm, Link
from ..device.peak_flops import peak
from ..device.sending import to_device
from ..layout import DTYPES
from .job import Job
from .trace import Trace, wanted_steps

_SHORT = {"fp64": "f64", "fp32": "f32", "bf16": "bf16", "fp16": "f16"}
_FAR = 1 << 62  # nanoseconds; nothing has been received yet


class Split(NamedTuple):
    """The seconds of a step, as means over all ranks."""

    compute: float
    exposed_communication: float
    bubble: float


def split(intervals: Sequence[Interval], late: int) -> Split:
    """The split of one rank; `late` is the total lateness of its peers in nanoseconds."""
    work = waits = 0
    for interval in intervals:
        if interval.kind == "work":
            work += interval.end - interval.start
        elif interval.kind != "aside":
            waits += interval.end - interval.start
    return Split((work - waits) / 1e9, (waits - late) / 1e9, late / 1e9)


class Times:
    """The measurements of one rank. Either all ranks have one or none: they communicate at a step's end."""

    def __init__(
        self,
        comm: Comm,
        *,
        sizes: Mapping[str, int],
        links: Mapping[Link, int],
        stages: Sequence[int],
        metrics: bool,
        trace: Trace | None = None,
    ) -> None:
        self._comm = comm
        self._axes = tuple(axis for axis, size in sizes.items() if size > 1)
        self._ranks = 1
        for size in sizes.values():
            self._ranks *= size
        self._metrics = metrics
        self._trace = trace
        self._lateness = _Lateness(comm, links, stages)

    @classmethod
    def of(cls, job: Job, comm: Comm, rank: int, links: Mapping[Link, int], stages: Sequence[int]) -> Times:
        """The measurements that a run needs. Raises UsageError P0521."""
        trace = None
        if job.trace is not None:
            steps = wanted_steps(job.trace_steps, job.start, job.steps)
            trace = Trace(job.trace, steps, root=job.root, rank=rank, world_size=job.world_size, links=links)
        metrics = job.measures and not job.cuda_graphs  # replays of graphs cannot be measured
        return cls(comm, sizes=job.sizes, links=links, stages=stages, metrics=metrics, trace=trace)

    def peak(self, job: Job) -> tuple[float, str]:
        """The flops per second of all ranks' devices together, and their source. Virtual ranks share one device."""
        dtype = DTYPES[_SHORT[job.plan["precision"]]]
        own, origin = (job.peak_flops, "given") if job.peak_flops else peak(self._comm.device, dtype)
        if job.virtual:
            return own, origin
        return float(self._summed(torch.tensor(own, dtype=torch.float64, device=self._comm.device))), origin

    def begin(self, step: int) -> None:
        """Before the first step. Steps count from 0."""
        if self._metrics or (self._trace is not None and self._trace.wants(step)):
            self._comm.clock.start(self._comm.device)

    def end(self, step: int) -> Split | None:
        """After a step's update: the step's split; None if no metrics are wanted."""
        intervals = self._comm.clock.stop()
        if self._trace is not None:
            self._trace.add(step, intervals)
        split = self._mean(intervals) if self._metrics else None
        self._comm.clock.entering("between two steps")
        self.begin(step + 1)
        return split

    def close(self) -> None:
        """After the last step, which may precede the end of the traced steps."""
        self._comm.clock.stop()
        if self._trace is not None:
            self._trace.write()

    def _mean(self, intervals: Sequence[Interval]) -> Split:
        own = torch.tensor(split(intervals, self._lateness.of(intervals)), dtype=torch.float64)
        own = to_device(own, self._comm.device)
        return Split(*(self._summed(own) / self._ranks).tolist())

    def _summed(self, x: Tensor) -> Tensor:
        for axis in self._axes:
            x = self._comm.group((axis,)).all_reduce(x)
        return x


class _Lateness:
    """Measures the time that a rank waits in receives before its peers send."""

    def __init__(self, comm: Comm, links: Mapping[Link, int], stages: Sequence[int]) -> None:
        self._comm = comm
        self._out = [link for link in sorted(links) if link[0] in stages]
        self._in = [link for link in sorted(links) if link[0] not in stages]
        self._peers = links
        self._machine = machine()
        self._near: set[int] | None = None  # peers known to share the clock; None until all have answered
        # Peer -> shortest time from its send to this rank's receipt.
        self._quickest = dict.fromkeys(links.values(), _FAR)

    def of(self, intervals: Sequence[Interval]) -> int:
        """The lateness of peers in one step, in nanoseconds. All peers must call this."""
        if not self._peers:
            return 0
        sent = self._exchanged(
            {link: [each.start for each in _link_intervals(intervals, "send", link)] for link in self._out},
            {link: len(_link_intervals(intervals, "recv", link)) for link in self._in},
        )
        for link, times in sent.items():
            delays = [each.end - at for each, at in zip(_link_intervals(intervals, "recv", link), times, strict=True)]
            self._quickest[self._peers[link]] = min([self._quickest[self._peers[link]], *delays])
        offsets = self._offsets()
        late = 0
        for link, times in sent.items():
            for each, at in zip(_link_intervals(intervals, "recv", link), times, strict=True):
                here = at + offsets[self._peers[link]]
                late += max(0, min(here, each.end) - each.start)
        return late

    def _offsets(self) -> dict[int, int]:
        """For each peer, the offset between this rank's clock and the peer's."""
        if self._near is None:
            answers = self._exchanged({link: [self._machine] for link in self._out}, dict.fromkeys(self._in, 1))
            here = {self._peers[link] for link, (there,) in answers.items() if there == self._machine}
            self._near = here & {self._peers[link] for link in self._out}
        quickest = {link: [self._machine, self._quickest[self._peers[link]]] for link in self._between_nodes(self._out)}
        answers = self._exchanged(quickest, dict.fromkeys(self._between_nodes(self._in), 2))
        found = {self._peers[link]: self._offset(link, *numbers) for link, numbers in answers.items()}
        return dict.fromkeys(self._near, 0) | found

    def _between_nodes(self, links: Sequence[Link]) -> list[Link]:
        return [link for link in links if self._peers[link] not in (self._near or ())]

    def _offset(self, link: Link, machine: int, quickest: int) -> int:
        """The offset between this rank's clock and its peer's; `quickest` is the peer's measurement for this rank."""
        mine = self._quickest[self._peers[link]]
        if machine == self._machine or _FAR in (mine, quickest):
            return 0 if machine == self._machine or mine == _FAR else mine
        return (mine - quickest) // 2

    def _exchanged(self, said: Mapping[Link, Sequence[int]], counts: Mapping[Link, int]) -> dict[Link, list[int]]:
        """Send the numbers `said` over outgoing links, and return those that arrive over incoming ones.

        Links that only evaluations use have no numbers.
        """
        device = self._comm.device
        for link, numbers in said.items():
            if numbers:
                self._comm.send(to_device(torch.tensor(numbers, dtype=torch.int64), device), link)
        heard = {link: self._comm.recv((count,), torch.int64, link) for link, count in counts.items() if count}
        self._comm.drain()
        return {link: heard[link].wait().tolist() if link in heard else [] for link in counts}


def _link_intervals(intervals: Sequence[Interval], kind: str, link: Link) -> list[Interval]:
    """The intervals of a link in the order of posting, which is the same on both ends."""
    over = f"link {link[0]} {link[1]}"
    found = [interval for interval in intervals if interval.kind == kind and interval.over == over]
    return sorted(found, key=lambda interval: interval.posted)
