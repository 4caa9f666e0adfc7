"""A step of the emitted package against torch's own parallelism over a slow link: `python tests/benchmarks/real_link.py`.

The two ranks of a side run in two network namespaces that a token bucket joins (tests/network.py), each on a processor of
its own; `slept` sleeps where it would compute (workers/slept.py). Models, peers and turns are those of step_time.py. A ratio is that of the medians of the rounds; the range is that
of the ratios by rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from step_time import CASES, Case, Measured, measure

from tests.network import Unavailable, slow_link

MEGABIT = 1_000_000
SLEPT = Case(  # a microbatch crosses as 1 MiB, as in the case that computes
    peer="pp", what="Schedule1F1B", axis="pp", microbatches=4, workers=("slept.py", "slept.py"),
    sizes=("size=thin", "batch=8", "seq=2048"),
)  # fmt: skip
COMPRESSED = Case(peer="ddp", what="DDP", axis="dp", options=("--compress-grads", "int8"), tolerance=0.05)


def row(case: Case, megabits: int, ours: Measured, theirs: Measured) -> str:
    ratios = sorted(mine / other for mine, other in zip(ours.rounds, theirs.rounds, strict=True))
    mine, other = statistics.median(ours.rounds), statistics.median(theirs.rounds)
    package = f"{case.axis}=2{f', ZeRO {case.zero}' if case.zero else ''}{', int8' if case.options else ''}"
    package += ", slept" if case is SLEPT else ""
    return (
        f"| {package} | {case.what} | {megabits} | {mine:.0f} | {other:.0f} "
        f"| {mine / other:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) | {ours.fastest / theirs.fastest:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "cases", nargs="*", help=f"of {', '.join(case.peer for case in CASES)}, slept, int8; all by default"
    )
    parser.add_argument("--megabits", type=int, default=400, help="a second, in each direction; a quarter for int8")
    parser.add_argument("--rounds", type=int, default=9, help="after the first, at least 2")
    parser.add_argument("--steps", type=int, default=3, help="in each round")
    given = parser.parse_args()
    print("| mesh | peer | Mbit/s | partc, ms | peer, ms | ratio (lowest to highest) | of the fastest steps |")
    print("|---|---|---:|---:|---:|---|---:|", flush=True)
    wanted = [(case.peer, case, given.megabits) for case in CASES]
    wanted += [("slept", SLEPT, given.megabits), ("int8", COMPRESSED, given.megabits // 4)]
    for name, case, megabits in wanted:
        if given.cases and name not in given.cases:
            continue
        try:
            with tempfile.TemporaryDirectory() as folder, slow_link(megabits * MEGABIT) as hosts:
                pinned = [
                    replace(host, prefix=("taskset", "-c", str(place), *host.prefix))
                    for place, host in enumerate(hosts)
                ]
                print(row(case, megabits, *measure(case, Path(folder), pinned, given.rounds, given.steps)), flush=True)
        except Unavailable as error:
            sys.exit(f"no network namespaces here: {error}")


if __name__ == "__main__":
    main()
