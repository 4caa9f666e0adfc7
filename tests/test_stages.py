"""Stage cuts against enumeration."""

from __future__ import annotations

import itertools
import random

import pytest

from partc.passes.stages import balanced


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
