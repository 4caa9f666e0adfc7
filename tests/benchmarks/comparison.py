"""Predicted and measured step times: what the benchmarks of predictions share."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def prefer(process: int) -> None:
    """Let the session of a process run before other work of this machine, if the user may decide it."""
    with suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text("-19")


def complete(log: Path, steps: int) -> bool:
    """Whether a file of metrics has all steps of its run."""
    return log.exists() and len(log.read_text().splitlines()) == steps


def seconds(log: Path, warm: int) -> float:
    """The median over the steps after the first `warm`, without the time that measuring them takes."""
    entries = [json.loads(line) for line in log.read_text().splitlines()[warm:]]
    return statistics.median(entry["seconds"] - entry.get("measuring", 0.0) for entry in entries)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's correlation of distinct numbers."""
    return statistics.correlation(_ranks(first), _ranks(second))


def summary(errors: Sequence[float], correlation: float) -> str:
    """The mean error, its bias and the rank correlation, in words."""
    mean, bias = statistics.fmean(map(abs, errors)), statistics.fmean(errors)
    return f"mean error {mean:.1%}, bias {bias:+.1%}, rank correlation {correlation:.2f}"


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    for place, index in enumerate(order):
        found[index] = float(place)
    return found
