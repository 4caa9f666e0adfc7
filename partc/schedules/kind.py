"""What a pipeline schedule is: where stages stand, and the order in which a rank computes."""

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
    """A stage's forward pass (F), backward pass (B) or half of one (I: inputs, W: weights) of a microbatch."""

    stage: int
    kind: ComputeKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """A schedule by name.

    `placement` deals stages to ranks: one each ("line"), round and round ("loop": 0 1 2 0 1 2), or
    there and back ("v": 0 1 2 2 1 0). `stages_per_rank` is what a rank holds if nobody says how
    many; only a loop may have another number. `order(rank, ranks, stages, microbatches)` lists what
    a rank computes; every number of microbatches will do. `does` says it in a line.
    """

    name: str
    does: str
    placement: Placement
    stages_per_rank: int
    split_backward: bool  # some backward passes run as I and W
    order: Order


def rounds(ranks: int, microbatches: int) -> tuple[int, ...]:
    """Sizes of the groups in which a loop takes microbatches, all near the number of ranks, the largest first.

    Narayanan et al. 2021 ask for multiples of the number of ranks; groups of unequal size take any
    number. Where torch.distributed.pipelining can cut a number into equal groups, these are the same.
    """
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    return tuple(size + (index < larger) for index in range(count))


def looped(rank: int, ranks: int, stages: int, microbatches: int, kind: Literal["F", "B", "I"]) -> list[Compute]:
    """One direction of a loop: each round of microbatches through the rank's stages, backwards from the last."""
    mine = range(rank, stages, ranks)
    found = []
    first = 0
    for size in rounds(ranks, microbatches):
        for stage in mine if kind == "F" else reversed(mine):
            found += [Compute(stage, kind, index) for index in range(first, first + size)]
        first += size
    return found


Step = tuple[ComputeKind, int | None]  # a computation before it has its microbatch; its stage
WAITING: Step = ("W", None)  # of the oldest I that has no W yet


def steps_of(stage: int) -> tuple[Step, Step, Step]:
    """A stage's F, I and W."""
    return ("F", stage), ("I", stage), ("W", stage)


def numbered(steps: Iterable[Step], microbatches: int) -> list[Compute]:
    """Steps with their microbatches: each stage takes them in order, W after I.

    Those of microbatches that don't exist are left out: what waits for them is left out as well,
    so a schedule that is written for many microbatches serves for few.
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
