"""The ranks' processes on this machine and their state, from /proc.

A *place* identifies a process: its machine's boot, its pid namespace, its pid, and its start time, since pids are
reused.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

Condition = Literal["runs", "stopped", "gone", "unknown"]  # unknown: on another machine

# Environment variables that the ranks of a job share.
JOB_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")


@cache
def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def process_place() -> str:
    """This process's place."""
    return place_of(os.getpid()) or "elsewhere"


def run_state(place: str) -> Condition:
    """Whether a process runs. A process under a debugger counts as running."""
    machine, _, number = place.rpartition(":")[0].rpartition(":")
    if not machine or machine != _machine():
        return "unknown"
    try:
        state, began = _stat(int(number))
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except (OSError, ValueError, IndexError):
        return "unknown"
    if began != place.rpartition(":")[2] or state in "ZX":
        return "gone"
    return "stopped" if state == "T" else "runs"


def end_stopped(place: str) -> None:
    """Kill a stopped process: a launcher has no gentler way, and the process must not continue later."""
    if run_state(place) == "stopped":
        with suppress(OSError):  # the process has ended, or belongs to another user
            os.kill(int(place.split(":")[-2]), signal.SIGKILL)


def siblings() -> dict[int, str]:
    """The places of the ranks that this process's launcher has started on this machine, by rank."""
    try:
        mine, launcher = os.environ, os.getppid()
        while _variables(launcher).get("RANK") == mine.get("RANK", ""):  # a wrapper script around this rank
            launcher = int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])
        started = children(launcher)
    except (OSError, ValueError, IndexError):
        return {}
    found: dict[int, str] = {}
    for child in started:
        try:
            variables = _variables(child)
        except OSError:
            continue
        rank = variables.get("RANK", "")
        if rank.isdecimal() and all(variables.get(name) == mine.get(name) for name in JOB_VARIABLES):
            place = place_of(child)
            if place is not None:
                found[int(rank)] = place
    return found


def children(number: int) -> list[int]:
    """The processes that a process has started. Raises OSError."""
    tasks = list(Path(f"/proc/{number}/task").glob("*/children"))
    return [int(word) for task in tasks for word in task.read_text().split()]


def place_of(number: int) -> str | None:
    """The place of a process; None if it has ended, or if the system does not tell."""
    try:
        return f"{_machine()}:{number}:{_stat(number)[1]}"
    except (OSError, IndexError):
        return None


def _stat(number: int) -> tuple[str, str]:
    """The state of a process, and the clock tick of its start."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _variables(number: int) -> dict[str, str]:
    """The environment of a process at its start."""
    entries = Path(f"/proc/{number}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
