"""The share of communication that a step hides on a slow link: `python tests/benchmarks/slow_link.py`.

Two processes of one thread each; a link that takes as long for the collectives of a step as half of its computation
does (workers/slow.py), or as `--share` says. Steps without the link, with every collective waited for where it starts,
and as emitted take turns. Hidden is the part of the second's time over the first's that the third does without.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "gpt.py"
SIZE = """
CONFIGS["bench"] = Config(width=384, depth=8, heads=6, kv_heads=6, hidden=1024, vocabulary=2048)
"""
OPTIONS = ("size=bench", "batch=8", "seq=128")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    what: str
    mesh: str
    options: tuple[str, ...] = ()


CASES = (
    Case(what="gradients in buckets of 4 MB", mesh="dp=2", options=("--bucket", "4MB")),
    Case(what="ZeRO 1, buckets of 4 MB", mesh="dp=2", options=("--zero", "1", "--bucket", "4MB")),
    Case(what="ZeRO 2", mesh="dp=2", options=("--zero", "2")),
    Case(what="ZeRO 3", mesh="dp=2", options=("--zero", "3")),
    Case(what="tensors", mesh="tp=2"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--share", type=float, default=0.5, help="of a step's computation, what the link takes")
    parser.add_argument("cases", nargs="*", help="of the table's first column, those that hold one of these words")
    given = parser.parse_args()
    print("| case | MB received a step | MB/s | free s | waited for s | overlapped s | hidden |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "gpt.py"
        model.write_text(EXAMPLE.read_text() + SIZE)
        for case in CASES:
            if not given.cases or any(word in case.what for word in given.cases):
                print(measured(case, model, Path(folder), given.steps, given.share), flush=True)


def measured(case: Case, model: Path, folder: Path, steps: int, share: float) -> str:
    package = folder / f"build-{CASES.index(case)}"
    command = [sys.executable, "-m", "partc", "compile", str(model), "--mesh", case.mesh, *case.options]
    command += [word for option in OPTIONS for word in ("-D", option)]
    subprocess.run([*command, "-o", str(package)], check=True, capture_output=True)
    first = run(package, folder, 8, 0.0)
    bandwidth = first["bytes"] / (share * statistics.median(first["seconds"]["free"]))
    found = run(package, folder, steps, bandwidth)
    free, waited, overlapped = (statistics.median(times) for times in found["seconds"].values())
    hidden = 1 - (overlapped - free) / (waited - free)
    figures = (f"{found['bytes'] / 1e6:.1f}", f"{bandwidth / 1e6:.0f}", f"{free:.3f}", f"{waited:.3f}")
    return f"| {' | '.join((case.what, *figures, f'{overlapped:.3f}', f'{hidden:.0%}'))} |"


def run(package: Path, folder: Path, steps: int, bandwidth: float) -> dict[str, dict[str, list[float]]]:
    """The report of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    shared = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = []
    for rank in range(2):
        command = [sys.executable, str(HERE / "workers" / "slow.py"), str(package), str(folder / f"{rank}.json")]
        command += [str(steps), str(bandwidth)]
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    if any(process.wait() for process in processes):
        sys.exit("a rank failed")
    found: dict[str, dict[str, list[float]]] = json.loads((folder / "0.json").read_text())
    return found


if __name__ == "__main__":
    main()
