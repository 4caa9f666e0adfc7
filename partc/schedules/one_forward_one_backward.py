"""1F1B: a stage starts its backward passes as soon as the first can run, and then alternates.

Narayanan et al. 2019, "PipeDream", section 3.2, with the flush of Narayanan et al. 2021, "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.1. The idle time equals GPipe's, but rank r has
at most p - r microbatches in flight, whatever the total number.
"""

from __future__ import annotations

from partc.schedules.kind import Compute, ScheduleKind


def order(rank: int, ranks: int, stages: int, microbatches: int) -> list[Compute]:
    ahead = min(microbatches, ranks - rank)
    found = [Compute(rank, "F", index) for index in range(ahead)]
    for index in range(microbatches):
        found.append(Compute(rank, "B", index))
        if ahead + index < microbatches:
            found.append(Compute(rank, "F", ahead + index))
    return found


KIND = ScheduleKind(
    name="1f1b",
    does="forwards and backwards alternate, with fewer microbatches in flight",
    placement="line",
    stages_per_rank=1,
    split_backward=False,
    order=order,
)
