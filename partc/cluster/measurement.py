"""The rates of this machine's processes: matrix products, memory, launches, and collectives over gloo.

Each process computes with one thread, as packages on processors do by default. Rates are those of the quickest of
several runs, with all processes at work together, since they share memory and caches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partc.errors import PartcError

_SIDES = (256, 512, 1024)  # of square matrices
_BYTES = (1 << 10, 1 << 22, 1 << 24)  # of the operand of a collective
_SUMS = 12  # of each size, of which the quickest counts
_DTYPES = {"f32": "float32", "f64": "float64", "bf16": "bfloat16"}
_LIMIT = 300.0  # seconds
MARK = "measured by `partc cluster measure`"  # in every file


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """The rates of one of `processes` processes that work at one time."""

    processes: int
    memory: int
    peak: dict[str, float]
    bandwidth: float
    launch: float
    link: float  # bytes a second that a process receives in a ring
    latency: float  # seconds of a step of a ring

    def toml(self) -> str:
        """A cluster's file, as `--cluster` reads it."""
        peaks = ", ".join(f"{name} = {rate:.4g}" for name, rate in self.peak.items())
        links = f"gigabytes = {self.link / 1e9:.4g}\nlatency = {self.latency:.4g}\n"
        return (
            f"# The rates of this machine's processes, {MARK}.\n"
            f"nodes = 1\ndevices = {self.processes}\n\n"
            f'[device]\nname = "CPU"\nkind = "cpu"\nmemory = {self.memory}\npeak = {{ {peaks} }}\n'
            f"bandwidth = {self.bandwidth:.4g}\nlaunch = {self.launch:.4g}\nhost = 0.0\n\n"
            f'[inside]\nkind = "memory"\n{links}\n[between]\nkind = "tcp"\n{links}'
        )


def measured(processes: int) -> MeasuredRates:
    """Measure, with so many processes on this machine. Raises PartcError P0807 if they fail."""
    with tempfile.TemporaryDirectory(prefix="partc-measure-") as folder:
        found = _together(processes, Path(folder))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes
    return MeasuredRates(processes=processes, memory=memory, **found)


def _together(processes: int, folder: Path) -> dict[str, Any]:
    """The rates that the first of several processes measures beside the others."""
    here = [sys.executable, "-m", "partc.cluster.measurement", str(folder / "meeting")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*here, str(rank), str(processes)],
            env=environment,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        out, _ = started[0].communicate(timeout=_LIMIT)
        codes = [process.wait(timeout=10) for process in started]
    except subprocess.TimeoutExpired:
        codes, out = [1], ""
    finally:
        for process in started:
            process.kill()
    if any(codes):
        raise PartcError("P0807", f"{processes} processes on this machine did not finish", help="try fewer --processes")
    result: dict[str, Any] = json.loads(out)
    return result


def _quickest(run: Callable[[], object], *, times: int = 5, least: float = 0.02) -> float:
    """Seconds of one run: the quickest of several groups of runs."""
    run()
    start = time.perf_counter()
    run()
    count = max(1, int(least / max(1e-9, time.perf_counter() - start)))
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        for _ in range(count):
            run()
        best = min(best, (time.perf_counter() - start) / count)
    return best


def _work(meeting: str, rank: int, processes: int) -> dict[str, object]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes)
    peak = {}
    for name, dtype in _DTYPES.items():
        best = 0.0
        for side in _SIDES:
            x = torch.randn(side, side).to(getattr(torch, dtype))
            best = max(best, 2 * side**3 / _quickest(lambda x=x: x @ x, times=3))  # type: ignore[misc]
        peak[name] = best
    a, b = torch.randn(1 << 23), torch.randn(1 << 23)
    bandwidth = 3 * a.nbytes / _quickest(lambda: torch.add(a, b, out=a), times=3)
    small = torch.ones(4)
    launch = _quickest(lambda: small + small)
    latency, link = 5e-5, 1e9
    if processes > 1:
        times = {}
        for size in _BYTES:
            buffer = torch.ones(size // 4)
            found = []
            for _ in range(_SUMS):
                dist.barrier()
                start = time.perf_counter()
                dist.all_reduce(buffer)
                found.append(time.perf_counter() - start)
            times[size] = min(found)
        steps = 2 * (processes - 1)
        latency = times[_BYTES[0]] / steps
        moved = 2 * (processes - 1) / processes * (_BYTES[-1] - _BYTES[0])
        link = moved / max(1e-9, times[_BYTES[-1]] - times[_BYTES[0]])
    dist.destroy_process_group()
    return {"peak": peak, "bandwidth": bandwidth, "launch": launch, "link": link, "latency": latency}


if __name__ == "__main__":
    rates = _work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    if sys.argv[2] == "0":
        print(json.dumps(rates))
