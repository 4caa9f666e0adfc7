"""The calls of one stage, grouped into runs; a run of several calls is emitted as a loop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from partc.ir.program import Call, Program, Region


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive calls of one region, which may pass values from call to call."""

    region: Region
    calls: tuple[Call, ...]
    carried: tuple[
        tuple[int, int], ...
    ] = ()  # (argument, result) positions: a call's result is the next one's argument

    @property
    def loop(self) -> bool:
        return len(self.calls) > 1

    @property
    def title(self) -> str:
        """The calls by name: "blocks.0 to blocks.1", or a single one."""
        return f"{self.calls[0].name} to {self.calls[-1].name}" if self.loop else self.calls[0].name

    @cached_property
    def prefix(self) -> str:
        """The common prefix of the calls' names: "blocks" for blocks.0 and blocks.1; the name of a single call."""
        if not self.loop:
            return self.calls[0].name
        common = _common_start([f"{call.name}." for call in self.calls])
        return re.sub(r"\.?\d*$", "", common.rpartition(".")[0] or common) or self.region.name

    @cached_property
    def numbers(self) -> tuple[int, ...] | None:
        """The calls' numbers, if calls are named `prefix.<number>` and parameters relative to that; else None."""
        numbers = []
        for call in self.calls:
            match = re.fullmatch(re.escape(self.prefix) + r"\.(0|[1-9][0-9]*)", call.name)
            expected = tuple(f"{call.name}.{value.name}" for value in self.region.params)
            if match is None or call.params != expected:
                return None
            numbers.append(int(match.group(1)))
        return tuple(numbers)


def runs(program: Program, calls: Sequence[Call]) -> list[Run]:
    """The calls of one stage and phase, in order, in the longest possible runs."""
    readers = program.derived(_readers)
    found: list[Run] = []
    for call in calls:
        last = found[-1] if found else None
        longer = _extended(last, call, readers) if last is not None and last.region.name == call.region else None
        if longer is not None:
            found[-1] = longer
        else:
            found.append(Run(region=program.region(call.region), calls=(call,)))
    return found


def _readers(program: Program) -> dict[str, list[str]]:
    """The readers of each program value: names of calls, "loss" for results, "transfer" for other stages."""
    readers: dict[str, list[str]] = {name: ["loss"] for name in program.returned}
    for call in program.calls:
        for name in call.args:
            readers.setdefault(name, []).append(call.name)
    for transfer in program.transfers:
        readers.setdefault(transfer.value, []).append("transfer")
    return readers


def _extended(run: Run, call: Call, readers: dict[str, list[str]]) -> Run | None:
    """The run with one more call; None if the call does not continue it."""
    last = run.calls[-1]
    carried = []
    for index, (before, now) in enumerate(zip(last.args, call.args, strict=True)):
        if now in last.results:
            carried.append((index, last.results.index(now)))
        elif before != now:
            return None
    if run.loop and tuple(carried) != run.carried:
        return None
    if not carried or len({result for _, result in carried}) != len(carried):
        return None
    handed = {last.results[result] for _, result in carried}
    for name in last.results:
        expected = [call.name] if name in handed else []
        if readers.get(name, []) != expected:
            return None
    return replace(run, calls=(*run.calls, call), carried=tuple(carried))


def _common_start(names: list[str]) -> str:
    """The longest text that all names start with."""
    first, last = min(names), max(names)
    same = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(same, min(len(first), len(last)))]


def location(region: Region) -> str:
    """The line where the region's code starts: ` (gpt.py:31)`."""
    sources = [op.source for op in region.forward.ops if op.source]
    if not sources:
        return ""
    file = max({source.file for source in sources}, key=[source.file for source in sources].count)
    first = min(source.line for source in sources if source.file == file)
    return f" ({file.rpartition('/')[2]}:{first})"
