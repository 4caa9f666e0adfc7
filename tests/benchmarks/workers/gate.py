"""The shared part of both sides of a comparison: rounds that start at the driver's signal, and the report at the end."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One side of a comparison."""

    side: str  # what to run, as the worker knows it
    package: Path  # compiled from the model file that a peer runs as it is
    report: Path
    rounds: int
    steps: int  # per round

    @property
    def total(self) -> int:
        return self.rounds * self.steps


def read_task(argv: Sequence[str] | None = None) -> Task:
    parser = argparse.ArgumentParser()
    parser.add_argument("side")
    parser.add_argument("package", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("rounds", type=int)
    parser.add_argument("steps", type=int)
    return Task(**vars(parser.parse_args(argv)))


def wait_for_round(task: Task, step: int) -> None:
    """Before the first step of a round, say so, with the CPU time so far, and wait: the other side may be at work."""
    if step % task.steps == 0:
        print("ready", time.process_time(), flush=True)
        sys.stdin.readline()
