"""The definition of a pipeline schedule: the placement of stages, and the order of a rank's computations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

ComputeKind = Literal["F", "B", "I", "W"]
Placement = Literal["line", "loop", "v"]
Order = Callable[[int, int, int, int], "list[Compute]"]


@dataclass(frozen=True, slots=True)
class Compute:
    """A stage's computation for one microbatch: forward (F), backward (B), or half of backward (I: gradients of inputs,
    W: of weights).
    """

    stage: int
    kind: ComputeKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """A schedule.

    `placement` assigns stages to ranks: one stage each ("line"), round-robin ("loop": 0 1 2 0 1 2), or there and back
    ("v": 0 1 2 2 1 0). `stages_per_rank` is the default number of stages on a rank; only a loop allows another.
    `order(rank, ranks, stages, microbatches)` lists the computations of a rank, for any number of microbatches. `does`
    is a description in one line.
    """

    name: str
    does: str
    placement: Placement
    stages_per_rank: int
    split_backward: bool  # some backward passes run as I and W
    order: Order


def group_sizes(ranks: int, microbatches: int) -> tuple[int, ...]:
    """The sizes of the groups in which a loop takes microbatches: close to the number of ranks, the largest first.

    Narayanan et al. 2021 require multiples of the number of ranks; groups of unequal size allow any number. If
    torch.distributed.pipelining can form equal groups, the groups here are the same.
    """
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    return tuple(size + (index < larger) for index in range(count))


def looped(rank: int, ranks: int, stages: int, microbatches: int, kind: Literal["F", "B", "I"]) -> list[Compute]:
    """One direction of a loop: each group of microbatches runs through the rank's stages, in reverse order for
    backward.
    """
    mine = range(rank, stages, ranks)
    found = []
    first = 0
    for size in group_sizes(ranks, microbatches):
        for stage in mine if kind == "F" else reversed(mine):
            found += [Compute(stage, kind, index) for index in range(first, first + size)]
        first += size
    return found


Step = tuple[ComputeKind, int | None]  # a computation whose microbatch is not known yet, and its stage
WAITING: Step = ("W", None)  # W for the oldest I that has no W yet


def steps_of(stage: int) -> tuple[Step, Step, Step]:
    """A stage's F, I and W."""
    return ("F", stage), ("I", stage), ("W", stage)


def numbered(steps: Iterable[Step], microbatches: int) -> list[Compute]:
    """The computations of the steps: each stage takes its microbatches in order, W after I.

    Steps of microbatches that do not exist are left out, as are steps that wait for them, so that a schedule for many
    microbatches also serves few.
    """
    return [compute for compute in _counted(steps) if compute.microbatch < microbatches]


def _counted(steps: Iterable[Step]) -> Iterator[Compute]:
    done: Counter[tuple[int | None, bool]] = Counter()
    halves: list[Compute] = []
    for kind, stage in steps:
        if kind == "W":
            half = next(item for item in halves if stage in (None, item.stage))
            halves.remove(half)
            yield Compute(half.stage, "W", half.microbatch)
            continue
        assert stage is not None
        compute = Compute(stage, kind, done[stage, kind == "F"])
        done[stage, kind == "F"] += 1
        if kind == "I":
            halves.append(compute)
        yield compute
