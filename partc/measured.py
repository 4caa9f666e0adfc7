"""What ranks wrote with `train.py --trace`: read, checked, and put on one axis of time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from partc.errors import PartcError
from partc.runtime.clock import Interval
from partc.runtime.times import Split, split
from partc.runtime.trace import FORMAT

_NAME = re.compile(r"rank_(\d+)\.json")
_KINDS: Mapping[str, type] = {
    "package": str, "plan": str, "rank": int, "world_size": int, "peers": dict, "machine": int, "epoch": int,
    "steps": list,
}  # fmt: skip

Steps = Mapping[int, tuple[Interval, ...]]  # by number, counted from 1


@dataclass(frozen=True)
class Measured:
    """Some steps of a run. Every rank's times are nanoseconds of one clock."""

    package: Path
    plan: str  # the digest of its plan.json
    ranks: tuple[Steps, ...]
    peers: tuple[Mapping[str, int], ...]  # by rank: link -> the rank at its other end
    one_machine: bool

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(self.ranks[0])

    def span(self, step: int) -> tuple[int, int]:
        """When the first rank began a step, and when the last one ended it."""
        found = [each for rank in self.ranks for each in rank[step] if each.kind == "work"]
        return min(each.start for each in found), max(each.end for each in found)

    @cached_property
    def messages(self) -> tuple[tuple[int, int, Interval, Interval], ...]:
        """Sender, receiver, the sending and the waiting of all that was sent from rank to rank."""
        return tuple(message for step in self.steps for message in self._messages(step))

    def _messages(self, step: int) -> Iterator[tuple[int, int, Interval, Interval]]:
        for rank, peers in enumerate(self.peers):
            for link, peer in peers.items():
                sent = _over(self.ranks[rank][step], "send", link)
                if sent:
                    got = _over(self.ranks[peer][step], "recv", link)
                    yield from ((rank, peer, a, b) for a, b in zip(sent, got, strict=False))

    @cached_property
    def split(self) -> tuple[float, Split]:
        """Seconds of a step, and where they go: means over its ranks and all steps."""
        late = [0] * len(self.ranks)
        for _, receiver, sent, got in self.messages:
            late[receiver] += max(0, min(sent.start, got.end) - got.start)
        each = [split([x for step in rank.values() for x in step], late[at]) for at, rank in enumerate(self.ranks)]
        count = len(self.ranks) * len(self.steps)
        spans = [end - start for start, end in map(self.span, self.steps)]
        return sum(spans) / len(spans) / 1e9, Split(*(sum(values) / count for values in zip(*each, strict=True)))


def read_trace(folder: Path) -> Measured:
    """The traces of all ranks. Raises PartcError P0607."""
    paths = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    if 0 not in paths:
        raise _wrong(f"{folder} has no rank_000.json")
    first = _read(paths[0])
    heads = [first]
    for rank in range(1, first["world_size"]):
        if rank not in paths:
            raise _wrong(f"{folder} has no rank_{rank:03d}.json, of {first['world_size']} ranks")
        head = _read(paths[rank])
        if (head["plan"], head["world_size"]) != (first["plan"], first["world_size"]) or head["rank"] != rank:
            raise _wrong(f"{paths[rank]} is of another run than {paths[0]}")
        if list(head["steps"]) != list(first["steps"]):
            raise _wrong(f"{paths[rank]} has other steps than {paths[0]}")
        heads.append(head)
    one_machine = len({head["machine"] for head in heads}) == 1
    return Measured(
        package=Path(first["package"]),
        plan=first["plan"],
        ranks=tuple(_shifted(head["steps"], 0 if one_machine else head["epoch"]) for head in heads),
        peers=tuple(head["peers"] for head in heads),
        one_machine=one_machine,
    )


def _read(path: Path) -> dict[str, Any]:
    """A file, with its steps as intervals."""
    try:
        head = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(f"{path} cannot be read: {error}") from None
    if not isinstance(head, dict) or head.get("partc_trace") != FORMAT:
        raise _wrong(f"{path} is not a trace of format {FORMAT}")
    for name, kind in _KINDS.items():
        if not isinstance(head.get(name), kind) or isinstance(head[name], bool):
            raise _wrong(f"{path} has no {name!r}, or one that is no {kind.__name__}")
    if head.get("fields") != list(Interval._fields):
        raise _wrong(f"{path} has intervals of {head.get('fields')}")
    try:
        head["steps"] = {int(each["step"]): tuple(map(_interval, each["intervals"])) for each in head["steps"]}
    except (KeyError, TypeError, ValueError) as error:
        raise _wrong(f"{path} has a step that is none: {error}") from None
    if not head["steps"] or not all(any(x.kind == "work" for x in step) for step in head["steps"].values()):
        raise _wrong(f"{path} has no step, or one without work")
    return head


def _interval(fields: Sequence[Any]) -> Interval:
    found = Interval(*fields)
    for value, kind in zip(found, (int, int, str, str, str, int, str, int), strict=True):
        if not isinstance(value, kind):
            raise ValueError(f"{value!r} is no {kind.__name__}")
    return found


def _shifted(steps: Steps, by: int) -> Steps:
    return {
        step: tuple(
            each._replace(start=each.start + by, end=each.end + by, posted=each.posted + by) for each in intervals
        )
        for step, intervals in steps.items()
    }


def _over(intervals: Sequence[Interval], kind: str, over: str) -> list[Interval]:
    return sorted((x for x in intervals if x.kind == kind and x.over == over), key=lambda x: x.posted)


def _wrong(cause: str) -> PartcError:
    return PartcError("P0607", cause, help="name a folder that train.py --trace wrote, or a package")
