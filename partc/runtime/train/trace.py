"""Traces of some steps for `partc trace`: one JSON file per rank."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..clock import Interval, machine
from ..errors import UsageError, tell, writing
from ..whole_files import write_whole

FORMAT = 1


def wanted_steps(text: str | None, start: int, steps: int) -> range:
    """The steps to trace, counted from 0: `3:5` is the third to the fifth; by default three after a run's first.

    Raises UsageError P0521 if the run, from `start` to before `steps`, contains none of them.
    """
    if text is None:
        return range(min(start + 1, max(start, steps - 1)), min(start + 4, steps))
    first, several, last = text.partition(":")
    try:
        found = range(int(first) - 1, int(last if several else first))
    except ValueError:
        found = range(0)
    if not range(max(start, found.start), min(steps, found.stop)) or found.start < 0:
        cause = f"--trace-steps {text} is out of range: this run makes steps {start + 1} to {steps}"
        raise UsageError("P0521", cause, "give the first and the last, as in --trace-steps 3:5", alike=True)
    return range(found.start, min(steps, found.stop))


class Trace:
    """One rank's intervals in the steps from `first` to before `last`, counted from 0."""

    def __init__(
        self,
        folder: Path,
        steps: range,
        *,
        root: Path,
        rank: int,
        world_size: int,
        links: Mapping[tuple[int, int], int],
    ) -> None:
        self._path = folder / f"rank_{rank:03d}.json"
        self._steps = steps
        self._folder = folder
        self._rank = rank
        self._head = {
            "partc_trace": FORMAT,
            "package": str(root.resolve()),
            "plan": hashlib.sha256((root / "plan.json").read_bytes()).hexdigest(),
            "rank": rank,
            "world_size": world_size,
            "peers": {f"link {source} {target}": peer for (source, target), peer in links.items()},
            "machine": machine(),
            # Monotonic clocks of machines differ; their time of day gives the offset.
            "epoch": time.time_ns() - time.monotonic_ns(),
        }
        self._kept: list[dict[str, Any]] = []

    def wants(self, step: int) -> bool:
        return step in self._steps

    def add(self, step: int, intervals: Sequence[Interval]) -> None:
        """Add the intervals of a step, if it is wanted; writes the file after the last one."""
        if step not in self._steps:
            return
        self._kept.append({"step": step + 1, "intervals": intervals})
        if step == self._steps[-1]:
            self.write()

    def write(self) -> None:
        """Write all intervals; the file is complete or absent."""
        if not self._kept:
            return
        with writing(self._folder, self._rank):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(self._head | {"fields": Interval._fields, "steps": self._kept}))
        if self._rank == 0:
            traced = f"{self._kept[0]['step']} to {self._kept[-1]['step']}"
            tell(f"traced steps {traced}: partc trace {self._folder} shows them")
        self._kept = []
