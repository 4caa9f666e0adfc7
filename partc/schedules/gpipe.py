"""GPipe: all forwards, then all backwards.

Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
section 2.3. Every microbatch is in flight at once; a share (p - 1) / (m + p - 1) of a step is idle.
"""

from __future__ import annotations

from partc.schedules.kind import Compute, ScheduleKind


def order(rank: int, ranks: int, stages: int, microbatches: int) -> list[Compute]:
    forwards = [Compute(rank, "F", index) for index in range(microbatches)]
    return [*forwards, *(Compute(rank, "B", index) for index in range(microbatches))]


KIND = ScheduleKind(
    name="gpipe",
    does="all forwards, then all backwards",
    placement="line",
    stages_per_rank=1,
    split_backward=False,
    order=order,
)
