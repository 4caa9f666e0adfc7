"""The computations of torch.distributed.pipelining's own schedules, in order, without processes."""

from __future__ import annotations

import logging
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining import schedules

logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)

CLASSES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipe-v": schedules.ScheduleDualPipeV,
}


class Recorder:
    """A stage that notes what it is asked to compute, has no neighbours and computes nothing."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.is_last, self.done = rank, ranks, rank == ranks - 1, []
        self.group, self.submod, self.has_backward, self.device = None, torch.nn.Module(), True, "cpu"

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: []

    def forward_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> None:
        self.done.append(f"{self.stage_index}F{index}")

    def backward_one_chunk(self, index: int, **kwargs: Any) -> None:
        self.done.append(f"{self.stage_index}B{index}")


def build(name: str, ranks: int, each: int, microbatches: int) -> Any:
    """A schedule with several stages a rank; raises ValueError for counts that torch doesn't take."""
    stages = [
        SimpleNamespace(
            group_size=ranks, group_rank=0, num_stages=ranks * each, stage_index=index, stage_index_to_group_rank={},
            is_first=False, is_last=False, has_backward=True, submod=torch.nn.Module(), group=None,
        )
        for index in range(each)
    ]  # fmt: skip
    return CLASSES[name](stages, microbatches)


@lru_cache
def computed(name: str, ranks: int, each: int, microbatches: int) -> tuple[tuple[str, ...], ...] | None:
    """Compute actions of every rank, pairs of overlapped ones apart; None where torch doesn't take the counts."""
    try:
        if issubclass(CLASSES[name], schedules.PipelineScheduleSingle):
            return tuple(_played(name, rank, ranks, microbatches) for rank in range(ranks))
        order = build(name, ranks, each, microbatches).pipeline_order
    except ValueError:
        return None
    return tuple(
        tuple(str(part) for action in order[rank] if action for part in action.sub_actions or (action,))
        for rank in range(ranks)
    )


def _played(name: str, rank: int, ranks: int, microbatches: int) -> tuple[str, ...]:
    """The computations that a stage really runs in a step; torch's printed order for 1F1B counts forwards from 1."""
    stage = Recorder(rank, ranks)
    CLASSES[name](stage, microbatches)._step_microbatches([()] * microbatches, [{}] * microbatches)
    return tuple(stage.done)
