"""The table of pipeline schedules; each schedule is one file."""

from __future__ import annotations

from collections.abc import Mapping

from partc.errors import PartcError
from partc.schedules import dualpipe_v, gpipe, interleaved, one_forward_one_backward, zbv, zero_bubble
from partc.schedules.kind import Compute, ComputeKind, ScheduleKind

__all__ = ["SCHEDULES", "Compute", "ComputeKind", "ScheduleKind", "compute_order", "stage_ranks"]

SCHEDULES: Mapping[str, ScheduleKind] = {
    module.KIND.name: module.KIND
    for module in (gpipe, one_forward_one_backward, interleaved, zero_bubble, zbv, dualpipe_v)
}

MOST_STAGES = 1 << 20


def stage_ranks(kind: ScheduleKind, ranks: int, stages: int) -> tuple[int, ...]:
    """The pipeline rank of every stage. Raises PartcError P0406 if the schedule cannot place this number of stages."""
    each, rest = divmod(stages, ranks)
    if rest or each < 1 or (kind.placement != "loop" and each != kind.stages_per_rank):
        wanted = "one or more, the same number," if kind.placement == "loop" else str(kind.stages_per_rank)
        raise PartcError(
            "P0406",
            f"{kind.name} cannot place {stages} stages on {ranks} pipeline rank{'s' * (ranks != 1)}: it takes {wanted} "
            "on each",
            help="leave out --virtual-stages",
        )
    if stages > MOST_STAGES:
        raise PartcError(
            "P0406",
            f"{stages:,} stages are more than {MOST_STAGES:,}",
            help="give fewer --virtual-stages",
        )
    if kind.placement == "v":
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(stage % ranks for stage in range(stages))


def compute_order(kind: ScheduleKind, ranks: int, microbatches: int, stages: int) -> tuple[tuple[Compute, ...], ...]:
    """The computations of each pipeline rank, in order. Raises PartcError P0406."""
    stage_ranks(kind, ranks, stages)
    return tuple(tuple(kind.order(rank, ranks, stages, microbatches)) for rank in range(ranks))
