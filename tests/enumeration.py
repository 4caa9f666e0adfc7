"""The planner against enumeration: `python -m tests.enumeration --cases 500`.

A case is a small random model, cluster, memory and batch. All plans of its space are simulated one by one; the
planner's best must be as quick as the best of them that fits, and no bound may be above a simulated value.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from partc.cluster.cluster import Cluster, preset
from partc.errors import PartcError
from partc.planner.planning import Planner, Request
from partc.planner.search import Played
from partc.planner.space import divisors

_ROOT = Path(__file__).parents[1]
_MODELS = {"gpt": "examples/gpt.py", "mlp": "examples/mlp.py", "routed": "tests/models/routed.py"}
_DEVICES = ("H100-80GB", "A100-40GB", "V100-16GB", "RTX4090-24GB", "CPU")
_MOST = 400  # plans of a case
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Case:
    """A request, and a share of the memory range of its plans: 1 is enough for all of them."""

    request: Request
    share: float

    def __str__(self) -> str:
        wanted = self.request
        options = ",".join(f"{name}={value}" for name, value in wanted.options.items())
        model = Path(wanted.model).stem
        return f"{model} {wanted.cluster.name} {options} {dict(wanted.fixed)} memory {self.share:.2f}"


def case(seed: int) -> Case:
    """The case of a number."""
    chance = random.Random(seed)
    nodes, devices = chance.choice(((1, 2), (1, 4), (2, 2), (1, 6), (2, 4), (1, 8), (4, 2)))
    cluster: Cluster = preset(f"{nodes}x{devices}x{chance.choice(_DEVICES)}")
    model = chance.choice(("gpt", "gpt", "mlp", "routed", "routed"))
    batch = chance.choice((4, 6, 8, 12, 16))
    options: dict[str, bool | int | float | str] = {"batch": batch}
    if model == "gpt":
        options |= {"size": chance.choice(("tiny", "1b", "8b")), "depth": chance.choice((1, 2, 3, 5))}
        options |= {"seq": chance.choice((32, 256, 2048))}
    elif model == "mlp":
        options |= {"width": chance.choice((32, 96, 4096)), "hidden": 8192, "depth": chance.choice((1, 2, 4, 6))}
    else:
        options |= {"width": chance.choice((32, 1024)), "hidden": chance.choice((48, 4096)), "chosen": 2}
        options |= {"depth": chance.choice((1, 2, 3)), "experts": chance.choice((4, 6, 8))}
        options |= {"seq": chance.choice((16, 512))}
    fixed: dict[str, tuple[str, ...]] = {}
    fixed |= {"recompute": (chance.choice(("none", "selective", "full")),)} if chance.random() < 0.6 else {}
    if chance.random() < 0.5:
        fixed["zero"] = tuple(chance.sample(("0", "1", "2", "3"), 2))
    if chance.random() < 0.5:
        fixed["microbatches"] = tuple(map(str, chance.sample(divisors(batch), 2)))
    if chance.random() < 0.5:
        fixed["schedule"] = tuple(chance.sample(("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv"), 2))
    if model == "gpt" and chance.random() < 0.7:
        fixed["cp"] = ("1",)
    if model == "routed":
        fixed["ep"] = tuple(chance.sample(("1", "2", "4", "8"), 2))
        fixed |= {"cp": ("1", "2")} if chance.random() < 0.3 else {}
    request = Request(
        model=str(_ROOT / _MODELS[model]),
        cluster=cluster,
        ranks=nodes * devices,
        limit=cluster.device.memory,
        options=options,
        fixed=fixed,
        precision=chance.choice(("bf16", "fp32")),
    )
    return Case(request=request, share=chance.choice((0.05, 0.3, 0.7, 1.0)))


@dataclass(frozen=True, kw_only=True)
class Result:
    """The comparison of a case: the number of plans, of simulated ones, and the faults."""

    plans: int
    simulated: int
    faults: tuple[str, ...]


def compared(case: Case) -> Result | None:
    """The result of a case; None if its space is empty or too large to enumerate."""
    planner = Planner(case.request)
    try:
        plans = list(planner.space.plans())
    except PartcError as error:
        if error.code != "P0812":
            raise
        return None
    if len(plans) > _MOST:
        return None
    every = [Played(plan=plan, bound=planner.bounds.of(plan), prediction=planner.predicted(plan)) for plan in plans]
    known = [played for played in every if played.error is None]
    if not known:
        return None
    faults = [f"{played.plan.flags}: bound {played.bound}, {played.prediction}" for played in known if not played.holds]
    sizes = sorted(played.bytes for played in known)
    limit = int(sizes[0] + case.share * (sizes[-1] - sizes[0]))
    fitting = [played.seconds for played in known if played.bytes <= limit]
    outcome = planner.choice(limit=limit).outcome
    best = math.inf if outcome.best is None else outcome.best.seconds
    least = min(fitting)
    if not math.isclose(best, least, rel_tol=_ROUNDING):
        faults.append(f"the planner's best takes {best}, the best of all {least}")
    if outcome.best is not None and (outcome.gap > _ROUNDING or outcome.best.bytes > limit):
        faults.append(f"gap {outcome.gap}, {outcome.best.bytes} of {limit} bytes")
    simulated = len(outcome.fitting) + len(outcome.others)
    return Result(plans=len(plans), simulated=simulated, faults=tuple(faults))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seconds", type=float, default=math.inf)
    given = parser.parse_args()
    start, seed, done, plans, simulated, faulty = time.monotonic(), given.first, 0, 0, 0, 0
    while done < given.cases and time.monotonic() - start < given.seconds:
        current = case(seed)
        result = compared(current)
        if result is not None:
            done += 1
            plans += result.plans
            simulated += result.simulated
            faulty += bool(result.faults)
            for fault in result.faults[:3]:
                print(f"case {seed} ({current}): {fault}", flush=True)
        seed += 1
    print(f"{done} cases, {plans:,} plans, {simulated:,} of them simulated by the planner, {faulty} cases with faults")
    return 1 if faulty or not done else 0


if __name__ == "__main__":
    sys.exit(main())
