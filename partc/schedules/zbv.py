"""ZB-V: two stages on each rank, there and back, with gradients of weights in the otherwise idle time.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6. If F, I and W take equally long, the only idle time is
the filling and draining of the pipeline by F and W of single stages, and every rank keeps the activations of p
microbatches of its two stages: as much as the first rank of 1F1B.
"""

from __future__ import annotations

from partc.schedules.kind import Compute, ScheduleKind, Step, numbered, steps_of


def order(rank: int, ranks: int, stages: int, microbatches: int) -> list[Compute]:
    run = max(2 * ranks - 1, microbatches)
    after = ranks - rank
    f0, i0, w0 = steps_of(rank)
    f1, i1, w1 = steps_of(stages - 1 - rank)
    steps: list[Step] = [
        # fill
        *[f0] * (2 * after - 1),
        *[f1, f0] * rank,
        *[f1, i1, w1] * after,
        # steady
        *[f0, i0, w0, f1, i1, w1] * (run - ranks - after + 1),
        *[i0, w0, f1, i1, w1] * (after - 1),
        # drain
        *[i0, i1] * rank,
        *[i0, w0] * after,
        *[w1] * rank,
        *[w0] * rank,
    ]
    return numbered(steps, microbatches)


KIND = ScheduleKind(
    name="zbv",
    does="two stages a rank, there and back; gradients of weights fill idle time (ZB-V)",
    placement="v",
    stages_per_rank=2,
    split_backward=True,
    order=order,
)
