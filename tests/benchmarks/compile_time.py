"""How long compiling takes, and how much memory: `python tests/benchmarks/compile_time.py`.

Each case is one fresh `partc compile` process, interpreter start and imports included. "phases" is
the sum of the compiler's own phases without tracing's import of torch and without writing files.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.py"
UNCOUNTED = frozenset({"Loaded", "Written"})  # importing torch, and writing files


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    size: str
    mesh: str
    batch: int
    microbatches: int


CASES = (
    Case(size="8b", mesh="2x4x8", batch=16, microbatches=4),
    Case(size="8b", mesh="16x128x8", batch=4096, microbatches=32),
    Case(size="405b", mesh="2x4x8", batch=16, microbatches=4),
)


def measure(case: Case) -> dict[str, object]:
    """Seconds, peak resident memory and phases of one compile in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "partc", "compile", str(EXAMPLE), "--mesh", case.mesh, "--json"]
        command += ["-D", f"size={case.size}", "-D", f"batch={case.batch}", "--microbatches", str(case.microbatches)]
        start = time.perf_counter()
        process = subprocess.Popen([*command, "-o", f"{folder}/build"], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"{case} failed with status {status}")
    report = json.loads(output)
    phases = {name: value for name, value in report["phases"].items() if name not in UNCOUNTED}
    return {
        "seconds": seconds,
        "gib": usage.ru_maxrss / 2**20,
        "phases": sum(phases.values()),
        "ranks": report["ranks"],
    }


def main() -> None:
    print("| model | mesh | ranks | microbatches | seconds | GiB | phases, s |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for case in CASES:
        found = measure(case)
        print(
            f"| {case.size} | {case.mesh} | {found['ranks']} | {case.microbatches} | {found['seconds']:.1f} "
            f"| {found['gib']:.2f} | {found['phases']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
