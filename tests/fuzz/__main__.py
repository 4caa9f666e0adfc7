"""Search for failures: `python -m tests.fuzz --minutes 10 --seed 0`, or one case again: `--case '<its line>'`.

Half of the time goes to random graphs on many meshes (`search`), half to random modules over the operator table
(`modules`); `--only` names one of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shlex
import sys
import time
import traceback
from collections import Counter

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz import modules
from tests.fuzz.search import Case, cases, run
from tests.prefork import Server


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--case", help="a line that an earlier search printed")
    parser.add_argument("--only", choices=("graphs", "modules"))
    given_ = parser.parse_args(argv)
    if given_.case and "body" in json.loads(given_.case):
        with contextlib.closing(Server()) as server:
            print(modules.run(modules.Case.read(given_.case), server))
        return 0
    if given_.case:
        code = run(Case.read(given_.case))
        print(f"refused, {code}" if code else "holds")
        return 0
    start = random.SystemRandom().randrange(1 << 30) if given_.seed is None else given_.seed
    parts = [given_.only] if given_.only else ["modules", "graphs"]
    minutes = given_.minutes / len(parts)
    searches = {"modules": _modules, "graphs": _search}
    return max(searches[part](start, time.monotonic() + 60 * minutes) for part in parts)


def _modules(start: int, end: float) -> int:
    """One case a seed, until time is up; the first failure of each kind is made smaller and printed."""
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    with contextlib.closing(Server()) as server:
        while time.monotonic() < end:
            case = modules.draw(start)
            try:
                counts[modules.run(case, server)] += 1
            except modules.Failed as failure:
                failures[failure.kind] += 1
                if failures[failure.kind] == 1:
                    print(f"FAILED seed {start}: {failure}", flush=True)
                    smaller = modules.shrunk(case, failure.kind, server)
                    print(smaller.text, flush=True)
                    print(f"python -m tests.fuzz --case {shlex.quote(str(smaller))}", flush=True)
            start += 1
    total = counts.total() + failures.total()
    print(f"{total} modules, {failures.total()} failures; {_listed(counts)}; failed: {_listed(failures) or 'none'}")
    return 1 if failures else 0


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


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
    print(f"{counts['cases']} cases, {failed} failures; {_listed(counts)}")
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
