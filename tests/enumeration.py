"""The planner against enumeration: `python -m tests.enumeration --cases 500`.

A case is a small random model, cluster, memory and batch. All plans of its space are simulated one by one; the
planner's best must be as quick as the best of them that fits, and no bound may be above a simulated value. Cases of one
model share its programs, and those that differ in memory alone their simulations.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partc.cluster.cluster import Cluster, preset
from partc.compilation.plan import ParallelPlan
from partc.compilation.simulation import Simulator
from partc.errors import PartcError
from partc.planner.planning import Planner, Request
from partc.planner.search import Played
from partc.planner.space import Family, divisors

_ROOT = Path(__file__).parents[1]
_MODELS = {"gpt": "examples/gpt.py", "mlp": "examples/mlp.py", "routed": "tests/models/routed.py"}
_DEVICES = ("H100-80GB", "A100-40GB", "V100-16GB", "RTX4090-24GB", "CPU")
_SHAPES = ((1, 2), (1, 4), (2, 2), (1, 6), (2, 4), (1, 8), (4, 2), (2, 8), (3, 4))
_SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipe-v")
_SPACES = 24  # of a model
_MEMORIES = 6  # of a space
_MOST = 40  # plans of a space
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Cases:
    """A request, and shares of the memory range of its plans: 1 is enough for all of them, 0 for the least."""

    request: Request
    shares: tuple[float, ...]
    seed: int

    def __str__(self) -> str:
        wanted = self.request
        options = ",".join(f"{name}={value}" for name, value in wanted.options.items())
        model = Path(wanted.model).stem
        fix = ",".join(f"{name}={'|'.join(values)}" for name, values in wanted.fixed.items())
        return f"{model} {wanted.cluster.name} {options} {wanted.precision} --fix '{fix}'"


def cases(seed: int) -> Iterator[Cases]:
    """Some cases of a random model."""
    chance = random.Random(seed)
    model = chance.choice(("gpt", "gpt", "mlp", "routed", "routed"))
    batch = chance.choice((4, 6, 8, 12, 16))
    options: dict[str, bool | int | float | str] = {"batch": batch}
    if model == "gpt":
        options |= {"size": chance.choice(("tiny", "1b", "8b")), "depth": chance.choice((1, 2, 3, 5))}
        options |= {"seq": chance.choice((32, 256, 2048, 16384))}
    elif model == "mlp":
        options |= {"width": chance.choice((32, 96, 4096)), "hidden": 8192, "depth": chance.choice((1, 2, 4, 6))}
    else:
        options |= {"width": chance.choice((32, 1024)), "hidden": chance.choice((48, 4096)), "chosen": 2}
        options |= {"depth": chance.choice((1, 2, 3)), "experts": chance.choice((4, 6, 8))}
        options |= {"seq": chance.choice((16, 512))}
    precision = chance.choice(("bf16", "fp32"))
    for number in range(_SPACES):
        nodes, devices = chance.choice(_SHAPES)
        cluster: Cluster = preset(f"{nodes}x{devices}x{chance.choice(_DEVICES)}")
        request = Request(
            model=str(_ROOT / _MODELS[model]),
            cluster=cluster,
            ranks=nodes * devices,
            limit=cluster.device.memory,
            options=options,
            fixed=_fixed(model, batch, chance),
            precision=precision,
        )
        shares = (0.0, 1.0, *(chance.random() ** 2 for _ in range(_MEMORIES - 2)))  # small ones bind more often
        yield Cases(request=request, shares=shares, seed=_SPACES * seed + number)


def _fixed(model: str, batch: int, chance: random.Random) -> dict[str, tuple[str, ...]]:
    """A random part of the space."""
    fixed: dict[str, tuple[str, ...]] = {}
    if chance.random() < 0.3:
        fixed["loss_chunks"] = chance.choice((("1", "2"), ("2",)))
    if chance.random() < 0.5:
        fixed["zero"] = tuple(chance.sample(("0", "1", "2", "3", "3@2", "1@node", "3@node"), 3))
    if chance.random() < 0.4:
        fixed["schedule"] = tuple(chance.sample(_SCHEDULES, 2))
    if chance.random() < 0.2:
        fixed["bucket"] = ("1MB", "25MB")
    if chance.random() < 0.2:
        fixed["recompute"] = ("full/none", "none", "full")
    if model == "gpt" and chance.random() < 0.3:
        fixed["cp"] = ("1", "2")
    if model == "routed":
        fixed["ep"] = tuple(chance.sample(("1", "2", "4", "8"), 2))
        fixed |= {"cp": ("1", "2")} if chance.random() < 0.3 else {}
    return fixed


def narrowed(planner: Planner, chance: random.Random, most: int) -> Planner | None:
    """The planner with further decisions fixed, until few plans are left; None if there are none."""
    choices: dict[str, Any] = {
        "recompute": ("none", "selective", "full"),
        "zero": ("0", "1", "2", "3"),
        "microbatches": divisors(planner.space.batch),
        "schedule": _SCHEDULES,
        "order": ("pp-dp-cp-tp", "dp-pp-tp-cp", "tp-dp-cp-pp", "cp-tp-pp-dp"),
        "experts": ("dp", "tp", "dp-tp"),
        "stage_calls": ("balanced", "fitted"),
    }
    left = [*choices]
    while True:
        try:
            count = sum(map(len, planner.space.families()))
        except PartcError as error:
            if error.code != "P0812":
                raise
            return None
        if count <= most:
            return planner
        if not left:
            return None
        name = left.pop(chance.randrange(len(left)))
        known = planner.space.fixed.get(name) or tuple(map(str, choices[name]))
        values = tuple(chance.sample(known, min(len(known), chance.choice((1, 2)))))
        request = replace(planner.request, fixed={**planner.request.fixed, name: values})
        planner = Planner(request, planner.simulator)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The comparison of some cases: the numbers of plans and of simulated ones for each memory, and the faults."""

    cases: int
    plans: int
    errors: tuple[str, ...]  # of the plans that do not compile
    simulated: int
    request: Request
    faults: tuple[str, ...]


def compared(given: Cases, simulator: Simulator | None = None, most: int = _MOST) -> Result | None:
    """The result of the cases; None if their space is empty or no plan compiles."""
    chance = random.Random(given.seed)
    planner = narrowed(Planner(given.request, simulator), chance, most)
    if planner is None:
        return None
    families = list(planner.space.families())
    plans = [plan for family in families for plan in family.plans()]
    chance.shuffle(plans)  # tables serve many plans, whichever was the first
    every: dict[ParallelPlan, Played] = {}

    def played(plan: ParallelPlan) -> Played:
        if plan not in every:
            every[plan] = Played(plan=plan, bound=planner.bounds.of(plan), prediction=planner.predicted(plan))
        return every[plan]

    def suited(limit: int) -> Iterator[tuple[Played, Family]]:
        """All plans, with the stages that suit the memory."""
        for plan in plans:
            found = planner.suited(plan, limit)
            if found is not None:
                yield played(found), of[plan]

    of = {plan: family for family in families for plan in family.plans()}
    first = {id(each): planner.bounds.of_all_orders(each, planner.bounds.simple(each.least)) for each in families}
    bounds = {id(each): planner.bounds.of_family(each, first[id(each)]) for each in families}
    sizes = sorted(each.bytes for each, _ in suited(2**60) if each.error is None)
    if not sizes:
        return None
    faults: list[str] = []
    simulated = 0
    for share in given.shares:
        limit = int(sizes[0] + share * (sizes[-1] - sizes[0]))
        outcome = planner.choice(limit=limit).outcome
        simulated += len(outcome.fitting) + len(outcome.others)
        best = math.inf if outcome.best is None else outcome.best.seconds
        least = math.inf
        for each, family in suited(limit):
            if each.error is None and each.bytes <= limit:
                least = min(least, each.seconds)
            for whose, bound in (("", each.bound), (" of its family", bounds[id(family)])):
                if not replace(each, bound=bound).holds:
                    faults.append(f"{each.plan.flags}: bound {bound}{whose}, {each.prediction}")
        turned = given.request.per_layer and best < least  # plans by layer, whose uses differ from the fitted ones
        if not turned and not math.isclose(best, least, rel_tol=_ROUNDING):
            faults.append(f"memory {share}: the planner's best takes {best}, the best of all {least}")
        if outcome.best is not None and (outcome.gap > _ROUNDING or outcome.best.bytes > limit or outcome.wrong):
            faults.append(f"memory {share}: gap {outcome.gap}, {outcome.best.bytes} of {limit} bytes")
    return Result(
        cases=len(given.shares),
        plans=len(every),
        errors=tuple(each.error for each in every.values() if each.error is not None),
        simulated=simulated,
        request=planner.request,
        faults=tuple(faults),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the number of the first model")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--per-layer", action="store_true", help="also plans whose tp cuts the batch of some calls")
    given = parser.parse_args()
    start, seed, results, faulty = time.monotonic(), given.first, list[Result](), 0
    while sum(each.cases for each in results) < given.cases and time.monotonic() - start < given.seconds:
        simulator = None
        for some in cases(seed):
            some = replace(some, request=replace(some.request, per_layer=given.per_layer))
            simulator = Planner(some.request).simulator if simulator is None else simulator
            result = compared(some, simulator)
            if result is None:
                continue
            results.append(result)
            faulty += bool(result.faults)
            shown = replace(some, request=result.request)
            errors = ", ".join(sorted({error[:60] for error in result.errors}))
            print(
                f"model {seed}: {result.plans} plans, {result.simulated} simulated by the planner for {result.cases} "
                f"memories: {shown}{f', {len(result.errors)} errors: {errors}' if errors else ''}",
                flush=True,
            )
            for fault in result.faults[:3]:
                print(f"    WRONG {fault}", flush=True)
        seed += 1
    spaces = [each.plans for each in results]
    print(
        f"{sum(each.cases for each in results)} cases in {len(spaces)} spaces of {seed - given.first} models, "
        f"{sum(spaces):,} plans ({min(spaces, default=0)} to {max(spaces, default=0)} each), "
        f"{sum(each.simulated for each in results):,} simulated by the planner, {faulty} spaces with faults"
    )
    return 1 if faulty or not results else 0


if __name__ == "__main__":
    sys.exit(main())
