"""Search for failures: `python -m tests.fuzz --minutes 10 --seed 0`, or one case again: `--case '<its line>'`."""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.search import Case, cases, run


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--case", help="a line that an earlier search printed")
    given_ = parser.parse_args(argv)
    if given_.case:
        code = run(Case.read(given_.case))
        print(f"refused, {code}" if code else "holds")
        return 0
    start = random.SystemRandom().randrange(1 << 30) if given_.seed is None else given_.seed
    return _search(start, time.monotonic() + 60 * given_.minutes)


def _search(start: int, end: float) -> int:
    """Rounds of examples, each under a seed of its own, until time is up."""
    counts: Counter[str] = Counter()
    failed = 0
    while time.monotonic() < end:
        failure = _round(start, end, counts)
        if failure is not None:
            failed += 1
            print(f"FAILED seed {start}: python -m tests.fuzz --case '{failure}'", flush=True)
        start += 1
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    print(f"{counts['cases']} cases, {failed} failures; {kinds}")
    return 1 if failed else 0


def _round(number: int, end: float, counts: Counter[str]) -> Case | None:
    """The smallest failing case of a round, if there is one."""
    failing: list[Case] = []

    @seed(number)
    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(cases())
    def holds(case: Case) -> None:
        if time.monotonic() > end:
            return
        counts["cases"] += 1
        counts[f"mesh of {case.mesh.count('=1') and 3 - case.mesh.count('=1')} axes"] += 1
        counts[case.schedule] += 1
        try:
            code = run(case)
        except BaseException:
            failing.append(case)
            raise
        if code:
            counts[f"refused {code}"] += 1

    try:
        holds()
    except Exception:
        traceback.print_exc(limit=-3, file=sys.stderr)
        return failing[-1]
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
