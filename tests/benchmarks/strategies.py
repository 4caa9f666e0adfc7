"""ZeRO x recomputation x schedules x meshes, each held against the single-device model in fp64. `make strategies`.

Prints the worst relative error over all schedules and meshes for each model, level of ZeRO and kind of
recomputation, of losses, gradients and parameters of every rank. All schedules run on the meshes with
a pipeline; on the others there is nothing for them to order, so that they would be one and the same package.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import partc
from partc.schedules import SCHEDULES
from tests.benchmarks.models import Run, proved

NAMES = ("gpt", "gpt2_dropout", "mixtral")
LEVELS = ("1", "2", "3")
KINDS = ("none", "selective", "full")
MESHES = ("2", "2x2", "1x4x2", "pp=1,dp_out=2,dp_in=2,tp=1", "2x2x2", "pp=2,dp_out=2,dp_in=2,tp=1")
ALLOWED = 1e-10


def runs(only: str) -> Iterator[Run]:
    """Hybrid meshes hold parts over their inner axis, whole copies over the outer one."""
    for model in filter(lambda name: fnmatchcase(name, only), NAMES):
        for zero in LEVELS:
            for recompute in KINDS:
                for mesh in MESHES:
                    piped = partc.Mesh.parse(mesh).axis("pp") > 1
                    axes = "@dp_in" if "dp_in" in mesh else ""
                    for schedule in SCHEDULES if piped else ("1f1b",):
                        yield Run(
                            model=model,
                            mesh=mesh,
                            schedule=schedule,
                            microbatches=4,
                            zero=zero + axes,
                            recompute=recompute,
                        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="models whose name matches this pattern")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    worst: dict[tuple[str, str, str], float] = {}
    count, failed = 0, 0
    for row in proved(list(runs(given.only)), given.workers):
        run = row.run
        key = run.model, run.zero[0], run.recompute
        worst[key] = max(worst.get(key, 0.0), row.worst)
        count += 1
        if not row.worst < ALLOWED:
            failed += 1
            where = f"--mesh {run.mesh} --schedule {run.schedule} --zero {run.zero} --recompute {run.recompute}"
            print(f"{run.model} {where} --microbatches 4 --precision fp64: {row.error}", flush=True)
    print(f"| model | {' | '.join(f'zero {level}, {kind}' for level in LEVELS for kind in KINDS)} |")
    print(f"|---|{'---:|' * len(LEVELS) * len(KINDS)}")
    for model in dict.fromkeys(model for model, _, _ in worst):
        cells = [f"{worst[model, level, kind]:.0e}" for level in LEVELS for kind in KINDS]
        print(f"| {model} | {' | '.join(cells)} |")
    print(f"{count} packages, {failed} not equal to their models to {ALLOWED:.0e}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
