"""DualPipeV: two stages on each rank, there and back; a forward pass of one is paired with a backward pass of the
other.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1 (DualPipe), in the form that keeps each weight once:
github.com/deepseek-ai/DualPipe, dualpipev.py. The comments number the steps as that file does. Computations that should
run concurrently run one after the other here, forward first.
"""

from __future__ import annotations

from partc.schedules.kind import WAITING, Compute, ScheduleKind, Step, numbered, steps_of


def order(rank: int, ranks: int, stages: int, microbatches: int) -> list[Compute]:
    there, back = rank, stages - 1 - rank
    run = max(2 * ranks, microbatches)
    after = ranks - rank - 1
    f0, i0, _ = steps_of(there)
    f1, i1, _ = steps_of(back)
    b0: Step = ("B", there)
    b1: Step = ("B", back)
    half = rank + 1  # the number of last backward passes that are whole; the weights of the others wait
    steps: list[Step] = [
        *[f0] * (2 * after),  # 1
        *[f0, f1] * (rank + 1),  # 2
        *[i1, WAITING, f1] * after,  # 3
        *[f0, b1, f1, b0] * (run - 2 * ranks + rank + 1),  # 4
        *[b1, f1, b0] * after,  # 5
        *([b1, b0] * half)[:half],  # 6
        *([i1, i0] * half)[half:],
        *[WAITING, i0] * after,  # 7
        *[WAITING] * (rank + 1),  # 8
    ]
    return numbered(steps, microbatches)


KIND = ScheduleKind(
    name="dualpipe-v",
    does="two stages a rank, there and back; a forward of one with a backward of the other (DualPipeV)",
    placement="v",
    stages_per_rank=2,
    split_backward=True,
    order=order,
)
