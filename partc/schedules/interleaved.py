"""Interleaved 1F1B: v stages on every rank, assigned round-robin, so that a pipeline fills v times as fast.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.2.
The idle time is 1F1B's divided by v; there are v times as many transfers.
"""

from __future__ import annotations

from partc.schedules.kind import Compute, ScheduleKind, group_sizes, looped


def order(rank: int, ranks: int, stages: int, microbatches: int) -> list[Compute]:
    forwards = looped(rank, ranks, stages, microbatches, "F")
    backwards = looped(rank, ranks, stages, microbatches, "B")
    turns = stages // ranks - 1
    ahead = min(len(forwards), turns * group_sizes(ranks, microbatches)[0] + 2 * (ranks - 1 - rank))
    found = forwards[:ahead]
    for index, backward in enumerate(backwards):
        found += [*forwards[ahead + index : ahead + index + 1], backward]
    return found


KIND = ScheduleKind(
    name="interleaved",
    does="1f1b with several stages on every rank: less idle time, more transfers",
    placement="loop",
    stages_per_rank=2,
    split_backward=False,
    order=order,
)
