"""Schedules and stage cuts against what defines them: order, activations in flight, enumeration of cuts."""

from __future__ import annotations

import itertools
import random

import pytest

from partc.passes.schedule import SCHEDULES
from partc.passes.stages import balanced


@pytest.mark.parametrize("kind", sorted(SCHEDULES))
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 5), (2, 1), (3, 2), (4, 4), (4, 9)])
def test_each_microbatch_goes_forward_then_backward_once(kind: str, stages: int, microbatches: int) -> None:
    for stage in range(stages):
        order = SCHEDULES[kind](stage, stages, microbatches)
        assert sorted(order) == sorted(itertools.product("BF", range(microbatches)))
        assert all(order.index(("F", m)) < order.index(("B", m)) for m in range(microbatches))


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 6), (4, 4), (4, 12), (5, 3)])
def test_1f1b_keeps_as_many_microbatches_as_stages_follow(stages: int, microbatches: int) -> None:
    """Narayanan et al. 2021, section 2.2.1: at most p - i in flight on stage i, whatever m; GPipe keeps all m."""
    for stage in range(stages):
        for kind, most in (("1f1b", min(microbatches, stages - stage)), ("gpipe", microbatches)):
            steps = [1 if what == "F" else -1 for what, _ in SCHEDULES[kind](stage, stages, microbatches)]
            assert max(itertools.accumulate(steps)) == most


@pytest.mark.parametrize("seed", range(30))
def test_stages_are_balanced_as_enumeration_finds(seed: int) -> None:
    rng = random.Random(seed)
    work = [rng.choice([1.0, 2.5, 4.0, 9.0]) for _ in range(rng.randint(2, 9))]
    count = rng.randint(1, len(work))
    options = []
    for ends in itertools.combinations(range(1, len(work)), count - 1):
        bounds = (0, *ends, len(work))
        sizes = [sum(work[a:b]) for a, b in itertools.pairwise(bounds)]
        options.append((max(sizes), sum(size * size for size in sizes)))
    cuts = balanced(work, count)
    sizes = [sum(work[a:b]) for a, b in cuts]
    assert [a for a, _ in cuts] == [0, *(b for _, b in cuts[:-1])]
    assert (max(sizes), sum(size * size for size in sizes)) == pytest.approx(min(options))
