"""Commands in processes of their own, in which `partc` is this checkout's, installed or not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTC = (sys.executable, "-m", "partc")
TOLD = 3000  # characters at the end of what a command that failed has said


def environment(**more: str) -> dict[str, str]:
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **more}


def done(
    command: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None, *, show: bool = False
) -> str:
    """'' if it went well, within its time; else why not, in words. Its output is shown if it failed, or always."""
    if seconds <= 0:
        return "no time left"
    try:
        found = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(**(variables or {})),
            stdout=None if show else subprocess.PIPE,
            stderr=None if show else subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"took more than {seconds:.0f} s"
    if found.returncode:
        print(f"$ {' '.join(command)}\n{(found.stdout or '')[-TOLD:]}", flush=True)
        return f"exit code {found.returncode}"
    return ""
