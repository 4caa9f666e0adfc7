"""Recomputation budgets on random models: each is kept by every rank, or refused; no other choice takes less time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from partc import api, passes
from partc.compilation.fitting import within_budget
from partc.compilation.options import Options
from partc.cost.saved_tensors import Slot, Time, held_inputs
from partc.errors import PartcError
from partc.ir.program import Program, Region
from partc.passes.recompute import frontiers_of, with_recomputation
from partc.passes.recompute.budget import MOST_POINTS, Dealt, slots, with_points
from partc.rehearsal.rehearsal import rehearse
from tests.fuzz.model import Fuzzed
from tests.fuzz.search import KINDS

BEHIND = passes.before("recompute")[-1]
ALONE = {"batch_norm"}  # couples examples: its microbatches are batches of their own


class Case:
    """A random model on a random mesh, up to where it is decided what its calls save."""

    def __init__(self, seed: int, *, steps: int, depth: int) -> None:
        rng = random.Random(seed)
        kinds = [kind for kind in KINDS if kind not in ALONE]
        body = tuple((rng.choice(kinds), rng.randrange(6)) for _ in range(rng.randint(1, steps)))
        pp, dp, tp = (rng.choice((1, 1, 2)) for _ in range(3))
        microbatches = rng.choice((1, 2, 3))
        torch.manual_seed(0)
        self.model = Fuzzed(body, (), max(pp, rng.randint(2, depth)), 8, 12, 0)
        rows = 2 * dp * microbatches
        self.batch = {name: torch.randint(12, (rows, 4)) for name in ("ids", "labels")}
        self.options: dict[str, Any] = {
            "mesh": f"{pp}x{dp}x{tp}",
            "microbatches": microbatches,
            "zero": rng.choice((0, 2, 3)) if dp > 1 else 0,
            "schedule": rng.choice(("1f1b", "gpipe", "zero-bubble")) if pp > 1 else "1f1b",
        }

    def compiled(self, recompute: str) -> Program:
        checked = self._checked(recompute)
        return api.compilation(self.model, self.batch, checked, model_options={}).program

    def peak(self, recompute: str) -> int:
        return rehearse(self.compiled(recompute)).worst.peak

    def start(self) -> Program:
        checked = self._checked("none")
        return api.compilation(self.model, self.batch, checked, model_options={}, until=BEHIND).program

    def rest(self, program: Program, behind: str, **options: Any) -> tuple[passes.PassResult, ...]:
        return passes.run(program, {**self._checked("none").for_passes, **options}, behind=behind)

    def _checked(self, recompute: str) -> Options:
        given: dict[str, Any] = {
            "virtual_stages": None, "precision": "fp32", "seed": 0, "shard": (), "bucket": "25MB", "nodes": None,
            "grad_reduce": "fp32", "compress_grads": "none", "casts": (), "kernels": "aten", "memory_limit": None,
        }  # fmt: skip
        return Options.checked(**given, **self.options, recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [24, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(60) if seed != 24)]
)
def test_no_rank_holds_more_than_a_budget_or_it_is_refused(seed: int) -> None:
    case = Case(seed, steps=4, depth=5)
    known = {kind: case.peak(kind) for kind in ("none", "full")}
    least, most = sorted(known.values())
    for part in (-0.02, 0.1, 0.6):
        budget = int(least + part * (most - least))
        try:
            found = case.peak(f"{budget}B")
        except PartcError as error:
            assert error.code == "P0415" and budget < least, error
        else:
            assert found <= budget


# -- exhaustive searches ----------------------------------------------------------------------------


def dealings(points: int, count: int) -> Iterator[dict[int, int]]:
    """All ways to give as many calls points: those that save least come first."""
    for mix in itertools.combinations_with_replacement(reversed(range(points)), count):
        if len(set(mix)) <= MOST_POINTS:
            yield {point: mix.count(point) for point in dict.fromkeys(mix)}


def every(case: Case, start: Program, frontiers: Mapping[str, Sequence[Any]]) -> Iterator[list[tuple[int, int]]]:
    """By pipeline rank: the peak, and the time of recomputation, of all choices."""
    counts = slots(start, frontiers)
    held = held_inputs(start)

    def body(region: Region, point: int) -> Region:
        return with_recomputation(region, frontiers[region.name][point].saved | held[region.name])

    plain: Dealt = {slot: {0: count} for slot, count in counts.items()}
    for rank in range(start.mesh.axis("pp")):
        mine = [slot for slot in counts if start.place(slot[0]) == rank]
        found = []
        for mixes in itertools.product(*(dealings(len(frontiers[slot[1]]), counts[slot]) for slot in mine)):
            taken: dict[Slot, dict[int, int]] = {**plain, **dict(zip(mine, mixes, strict=True))}
            program = case.rest(with_points(start, taken, body), "recompute")[-1].program
            found.append(
                (rehearse(program).ranks[rank].peak, sum(effort(frontiers, slot, taken[slot]) for slot in mine))
            )
        yield found


def effort(frontiers: Mapping[str, Sequence[Any]], slot: Slot, taken: Mapping[int, int]) -> int:
    return sum(frontiers[slot[1]][point].effort * count for point, count in taken.items())


def efforts(start: Program, chosen: Program, frontiers: Mapping[str, Sequence[Any]]) -> list[int]:
    """By pipeline rank, what a choice takes, known by what its calls save."""
    found = [0] * start.mesh.axis("pp")
    for before, after in zip(start.calls, chosen.calls, strict=True):
        if before.region in frontiers:
            region, plain = chosen.region(after.region), start.region(before.region)
            held = held_inputs(start)[plain.name]
            alike = [
                point
                for point in frontiers[plain.name]
                if with_recomputation(plain, point.saved | held).backward == region.backward
            ]
            found[start.place(before.stage)] += alike[0].effort
    return found


TINY = (1, 10)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in TINY else (pytest.mark.matrix,)) for seed in range(60)]
)
def test_what_is_chosen_takes_the_least_time_of_all_that_fits(seed: int) -> None:
    case = Case(seed, steps=2, depth=3)
    start = case.start()
    frontiers = frontiers_of(start)
    choices = 1
    for slot, count in slots(start, frontiers).items():
        choices *= len(list(dealings(len(frontiers[slot[1]]), count)))
    if choices > 80:
        pytest.skip("too many choices to try all")
    table = list(every(case, start, frontiers))
    least, most = (max(kind(peak for peak, _ in found) for found in table) for kind in (min, max))
    for part in (-0.01, 0, 0.2, 0.5, 0.8):
        budget = int(least + part * (most - least))
        best = [min((time for peak, time in found if peak <= budget), default=None) for found in table]

        def choose(
            times: Sequence[Sequence[Time]], lowest: bool, budget: int = budget
        ) -> tuple[passes.PassResult, ...]:
            recompute = f"{0 if lowest else budget}B"
            return case.rest(start, BEHIND, recompute=recompute, times=times, frontiers=frontiers)

        try:
            steps = within_budget(budget, start, choose, further=100)
        except PartcError as error:
            assert error.code == "P0415" and None in best, (budget, best, error)
        else:
            assert rehearse(steps[-1].program).worst.peak <= budget
            assert efforts(start, steps[0].program, frontiers) == best
