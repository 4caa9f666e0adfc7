"""ZB-H1: 1F1B with gradients of weights deferred until a rank would be idle.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1. If F, I and W take equally long, a third of 1F1B's idle
time is left, with the same peak of activations. With several stages on every rank it is the ZB1P of
torch.distributed.pipelining.
"""

from __future__ import annotations

from partc.schedules.kind import Compute, ScheduleKind, group_sizes, looped


def order(rank: int, ranks: int, stages: int, microbatches: int) -> list[Compute]:
    forwards = looped(rank, ranks, stages, microbatches, "F")
    backwards = looped(rank, ranks, stages, microbatches, "I")
    weights = [Compute(half.stage, "W", half.microbatch) for half in backwards]
    turns = stages // ranks - 1
    ahead = min(len(forwards), turns * group_sizes(ranks, microbatches)[0] + ranks - 1 - rank)
    found = forwards[:ahead]
    for index, backward in enumerate(backwards):
        found += [*forwards[ahead + index : ahead + index + 1], backward]
        if index >= rank:
            found.append(weights[index - rank])
    return [*found, *weights[max(0, len(weights) - rank) :]]


KIND = ScheduleKind(
    name="zero-bubble",
    does="1f1b whose gradients of weights fill idle time (ZB-H1)",
    placement="loop",
    stages_per_rank=1,
    split_backward=True,
    order=order,
)
