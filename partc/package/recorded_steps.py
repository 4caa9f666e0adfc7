"""The traces that ranks wrote with `train.py --trace`: read, checked, and put on a common time axis."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from partc.errors import PartcError
from partc.runtime.clock import Interval, Kind
from partc.runtime.documents import Malformed, Natural, at_least, at_most, contents, decoded, parsed
from partc.runtime.plan import MOST_RANKS
from partc.runtime.train.step_times import Split, split
from partc.runtime.train.trace import FORMAT

_NAME = re.compile(r"rank_([0-9]{3,9})\.json")
_LINK = re.compile(r"link [0-9]{1,9} [0-9]{1,9}")
_AXES = re.compile(r"([a-z][a-z0-9_]*)(,[a-z][a-z0-9_]*)*( [0-9]{1,9}(,[0-9]{1,9})*)?")  # "dp,tp", "pp 0,2"
_OVER = {"send": _LINK, "recv": _LINK, "collective": _AXES}
Time = Annotated[int, at_least(-(1 << 62)), at_most(1 << 62)]  # nanoseconds


def _fields(fields: tuple[Any, ...]) -> str:
    """Check an interval's fields against each other."""
    start, end, kind, _, over, *_ = fields
    if start > end:
        return "which ends before it starts"
    return "" if kind not in _OVER or _OVER[kind].fullmatch(over) else f"over {over!r}"


_Interval = Annotated[tuple[Time, Time, Kind, str, str, Natural, str, Time], _fields]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepRecord:
    step: Natural
    intervals: tuple[_Interval, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A rank's trace file."""

    partc_trace: Literal[1]
    package: str
    plan: str
    rank: Natural
    world_size: Annotated[int, at_least(1), at_most(MOST_RANKS)]
    peers: dict[str, Natural]
    machine: int
    epoch: Time
    fields: tuple[str, ...]
    steps: tuple[_StepRecord, ...]


Steps = Mapping[int, tuple[Interval, ...]]  # by step number, counted from 1


@dataclass(frozen=True)
class Measured:
    """Measured steps of a run. All times are nanoseconds of one clock."""

    package: str  # the package's folder when it ran
    plan: str  # the digest of its plan.json
    ranks: tuple[Steps, ...]
    peers: tuple[Mapping[str, int], ...]  # for each rank: link -> the rank at its other end
    one_machine: bool

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(self.ranks[0])

    @property
    def axes(self) -> frozenset[str]:
        """The axes over which collectives ran."""
        found = {
            x.over.partition(" ")[0]
            for rank in self.ranks
            for step in rank.values()
            for x in step
            if x.kind == "collective"
        }
        return frozenset(axis for over in found for axis in over.split(","))

    def span(self, step: int) -> tuple[int, int]:
        """The start of a step on the first rank and its end on the last."""
        found = [each for rank in self.ranks for each in rank[step] if each.kind == "work"]
        return min(each.start for each in found), max(each.end for each in found)

    @cached_property
    def messages(self) -> tuple[tuple[int, int, Interval, Interval], ...]:
        """For each message between ranks: sender, receiver, the sending interval and the waiting interval."""
        return tuple(message for step in self.steps for message in self._messages(step))

    def _messages(self, step: int) -> Iterator[tuple[int, int, Interval, Interval]]:
        for rank, peers in enumerate(self.peers):
            for link, peer in peers.items():
                sent = _intervals_over(self.ranks[rank][step], "send", link)
                if sent:
                    got = _intervals_over(self.ranks[peer][step], "recv", link)
                    yield from ((rank, peer, a, b) for a, b in zip(sent, got, strict=False))

    @cached_property
    def split(self) -> tuple[float, Split]:
        """The seconds of a step, and their split: means over ranks and steps."""
        late = [0] * len(self.ranks)
        for _, receiver, sent, got in self.messages:
            late[receiver] += max(0, min(sent.start, got.end) - got.start)
        each = [split([x for step in rank.values() for x in step], late[at]) for at, rank in enumerate(self.ranks)]
        count = len(self.ranks) * len(self.steps)
        spans = [end - start for start, end in map(self.span, self.steps)]
        return sum(spans) / len(spans) / 1e9, Split(*(sum(values) / count for values in zip(*each, strict=True)))


def read_trace(folder: Path) -> Measured:
    """The traces of all ranks, from the folder of a run. Raises PartcError P0607."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise _error(f"{folder} cannot be read: {error.strerror}") from None
    paths = {int(match[1]): folder / name for name in names if (match := _NAME.fullmatch(name))}
    if 0 not in paths:
        raise _error(f"{folder} has no rank_000.json")
    first = _read(paths[0])
    files = [first]
    for rank in range(1, first.world_size):
        if rank not in paths:
            raise _error(f"{folder} has no rank_{rank:03d}.json, of {first.world_size} ranks")
        file = _read(paths[rank])
        if (file.plan, file.world_size, file.rank) != (first.plan, first.world_size, rank):
            raise _error(f"{paths[rank]} is of another run than {paths[0]}")
        if [each.step for each in file.steps] != [each.step for each in first.steps]:
            raise _error(f"{paths[rank]} has other steps than {paths[0]}")
        files.append(file)
    one_machine = len({file.machine for file in files}) == 1
    return Measured(
        package=first.package,
        plan=first.plan,
        ranks=tuple(_steps(file, 0 if one_machine else file.epoch) for file in files),
        peers=tuple(file.peers for file in files),
        one_machine=one_machine,
    )


def _read(path: Path) -> _File:
    try:
        found = parsed(contents(path, within=path.parent))
        if not isinstance(found, dict) or found.get("partc_trace") != FORMAT:
            raise Malformed(f"is not a trace of format {FORMAT}")
        if found.get("fields") != list(Interval._fields):
            raise Malformed(f"has intervals of {found.get('fields')!r:.80}")
        file = decoded(_File, found)
    except Malformed as error:
        raise _error(f"{path} {error}") from None
    numbers = [each.step for each in file.steps]
    if not numbers or len(set(numbers)) < len(numbers):
        raise _error(f"{path} has no step, or one twice")
    if not all(any(fields[2] == "work" for fields in each.intervals) for each in file.steps):
        raise _error(f"{path} has a step without work")
    if any(peer >= file.world_size for peer in file.peers.values()):
        raise _error(f"{path} has peers {file.peers}, of {file.world_size} ranks")
    return file


def _steps(file: _File, by: int) -> Steps:
    """A rank's steps on the common time axis."""
    return {
        each.step: tuple(
            found._replace(start=found.start + by, end=found.end + by, posted=found.posted + by)
            for found in (Interval(*fields) for fields in each.intervals)
        )
        for each in file.steps
    }


def _intervals_over(intervals: Sequence[Interval], kind: str, over: str) -> list[Interval]:
    return sorted((x for x in intervals if x.kind == kind and x.over == over), key=lambda x: x.posted)


def _error(cause: str) -> PartcError:
    return PartcError("P0607", cause, help="name a folder that train.py --trace wrote, or a package")
