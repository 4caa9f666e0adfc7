"""Stage cuts against enumeration."""

from __future__ import annotations

import itertools
import random

import pytest

from partc.passes.stages import CallLoad, balanced


@pytest.mark.parametrize("seed", range(40))
def test_stages_are_balanced_as_enumeration_finds(seed: int) -> None:
    rng = random.Random(seed)
    loads = [
        CallLoad(
            seconds=rng.choice([1.0, 2.5, 4.0, 9.0]),
            weights=rng.choice([0.0, 3.0, 8.0]),
            activations=rng.choice([1.0, 2]),
        )
        for _ in range(rng.randint(2, 9))
    ]
    count, microbatches = rng.randint(1, len(loads)), rng.randint(1, 5)

    def measured(runs: list[tuple[int, int]]) -> tuple[float, float, float]:
        time = [sum(load.seconds for load in loads[a:b]) for a, b in runs]
        held = [
            sum(load.weights + load.activations * min(microbatches, count - stage) for load in loads[a:b])
            for stage, (a, b) in enumerate(runs)
        ]
        return max(time), max(held), sum(each * each for each in time)

    options = []
    for ends in itertools.combinations(range(1, len(loads)), count - 1):
        options.append(measured(list(itertools.pairwise((0, *ends, len(loads))))))
    cuts = balanced(loads, count, microbatches)
    assert [a for a, _ in cuts] == [0, *(b for _, b in cuts[:-1])]
    assert measured(list(cuts)) == pytest.approx(min(options))


def test_the_first_of_equally_fast_stages_holds_least() -> None:
    """126 equal layers, an embedding and a head on 16 stages: 7 layers stand where most microbatches are kept."""
    layer, head = CallLoad(seconds=1, weights=9, activations=4), CallLoad(seconds=0.66, weights=6, activations=1)
    loads = [CallLoad(seconds=0.01, weights=6, activations=1), *[layer] * 126, head]
    sizes = [b - a for a, b in balanced(loads, 16, 16)]
    assert sizes == [8, *[8] * 14, 8]
    seconds = [sum(load.seconds for load in loads[a:b]) for a, b in balanced(loads, 16, 16)]
    assert all(max(seconds) <= 1.05 * (sum(seconds) - each) / 15 for each in seconds)
