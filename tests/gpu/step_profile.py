"""The kernels and host calls of a package's steps: `step_profile.py train.py STEPS OUT.json` trains under torch's profiler.

The last steps count; the first two have compiled kernels and filled caches.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from collections import Counter
from pathlib import Path

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

WARM = 2
MOST = 12  # of kernels, and of calls


def main(train: str, steps: int, out: Path) -> None:
    sys.path.insert(0, str(Path(train).parent))
    with tempfile.TemporaryDirectory() as reports:
        sys.argv = [train, "--device", "cuda", "--steps", str(steps), "--no-tuning", "--report", reports]
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as done:
            try:
                runpy.run_path(train, run_name="__main__")
            except SystemExit as error:
                if error.code:
                    raise
        seconds = json.loads((Path(reports) / "rank_000.json").read_text())["step_seconds"][WARM:]
    events = done.events()
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    start = max(event.time_range.end for event in kernels) - 1e6 * sum(seconds)
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    host: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        if event.time_range.start < start:
            continue
        if event.device_type == DeviceType.CUDA:
            times[event.name] += event.time_range.elapsed_us()
            launches[event.name] += 1
            continue
        host[event.name] += event.self_cpu_time_total
        calls[event.name] += 1
    count = len(seconds)
    found = {
        "step_ms": 1e3 * sum(seconds) / count,
        "kernels_ms": sum(times.values()) / 1e3 / count,
        "launches": sum(launches.values()) / count,
        "kernels": _means(times, launches, count),
        "host": _means(host, calls, count),
    }
    out.write_text(json.dumps(found))


def _means(spent: Counter[str], number: Counter[str], steps: int) -> dict[str, tuple[float, float]]:
    """Milliseconds and calls in a step, of the names that take most."""
    return {name: (each / 1e3 / steps, number[name] / steps) for name, each in spent.most_common(MOST)}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
