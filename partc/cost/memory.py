"""The memory account of a rank's step: the peak, its contents, and the memory in use over the step.

partc/rehearsal/ computes it. There is one entry for each pipeline coordinate: ranks that differ only on other axes hold
equal amounts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from partc.errors import PartcError
from partc.ir.naming import starred
from partc.ir.printer import readable
from partc.runtime.documents import Malformed, Natural, Positive, decoded

# In the order of display: permanent, for the length of a step, temporary.
CATEGORIES = (
    "parameters", "copies", "gradients", "optimizer", "constants", "batch", "activations", "temporaries",
    "communication",
)  # fmt: skip

# The memory of a process on a GPU besides tensors: CUDA's context (0.5 GiB), the workspaces of libraries, and NCCL's
# communicators (about 0.1 GiB each). An estimate that the account shows and does not count.
RESERVE = 2 << 30


def _category(name: str) -> str:
    return "" if name in CATEGORIES else f"none of {', '.join(CATEGORIES)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensors:
    """The tensors with one name that exist at the same time: their number and their total bytes."""

    category: Annotated[str, _category]
    name: str  # of a parameter, with * for numbers; or of a value, with its region: "block.attn_q"
    count: Positive
    bytes: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPosition:
    """A place in a step: the action, the call, the line of the stage's module, and the operation."""

    action: str
    call: str = ""
    line: str = ""  # "stages/stage_0.py:112"
    op: str = ""  # "aten.mm"

    def __str__(self) -> str:
        inside = f" in {self.call}" if self.call else ""
        code = ", ".join(filter(None, (self.line, self.op)))
        return f"{self.action}{inside}{f' ({code})' if code else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An action of a step: the peak during it, and the bytes held at its end."""

    action: str
    peak: Natural
    after: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The account of the ranks at one coordinate on the pipeline axis."""

    place: Natural
    stages: tuple[Natural, ...]
    peak: Natural
    at: StepPosition
    alive: tuple[HeldTensors, ...]  # at the peak, the largest first
    timeline: tuple[Moment, ...]
    host: Natural = 0  # bytes that `train.py --save` also holds in host memory: a copy of this rank's part

    @property
    def categories(self) -> dict[str, int]:
        """The bytes of the peak, by category."""
        found = dict.fromkeys(CATEGORIES, 0)
        for item in self.alive:
            found[item.category] += item.bytes
        return {name: size for name, size in found.items() if size}


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The account of all ranks in a step after the first, with the state of the named optimizer."""

    optimizer: str
    ranks: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        """The rank with the highest peak; the first of several."""
        return max(self.ranks, key=lambda rank: rank.peak)

    def __str__(self) -> str:
        """The rank with the highest peak: its bytes, its categories and its place in the step."""
        worst = self.worst
        rank = f"pipeline rank {worst.place}, " if len(self.ranks) > 1 else ""
        return f"{readable(worst.peak)} ({rank}at {worst.at.action}): {categories_text(worst)}"

    @property
    def summary(self) -> dict[str, Any]:
        """Each pipeline rank's peak, and the contents of the largest."""
        return {"peaks": [rank.peak for rank in self.ranks], "categories": self.worst.categories}

    def document(self) -> dict[str, Any]:
        """The account as a JSON document."""
        ranks = tuple(
            {
                **_fields(rank),
                "at": _fields(rank.at),
                "alive": tuple(map(_fields, rank.alive)),
                "timeline": tuple(map(_fields, rank.timeline)),
            }
            for rank in self.ranks
        )
        return {"optimizer": self.optimizer, "ranks": ranks}

    @classmethod
    def of(cls, document: Any) -> Account:
        """Read the result of `document`. Raises PartcError P0506 for anything else."""
        try:
            if document is None:
                raise Malformed("there is none")
            account = decoded(cls, document)
            if [rank.place for rank in account.ranks] != list(range(max(1, len(account.ranks)))):
                raise Malformed("its ranks are not numbered from 0")
        except Malformed as error:
            raise PartcError(
                "P0506", f"the account of memory cannot be read: {error}", help="compile the model again"
            ) from None
        return account


def _fields(item: Any) -> dict[str, Any]:
    return {name: getattr(item, name) for name in item.__slots__}


def categories_text(rank: RankMemory) -> str:
    """The categories of a rank's peak, in words, the largest first."""
    parts = sorted(rank.categories.items(), key=lambda item: -item[1])
    return ", ".join(f"{readable(size)} {name}" for name, size in parts)


def grouped_by_name(items: Mapping[tuple[str, str, int], int]) -> tuple[HeldTensors, ...]:
    """Group tensors (category, name, bytes) by name, the largest group first. `items` has the number of each.

    Numbers in names become *: blocks.0.mlp.up.weight and blocks.1.mlp.up.weight count as two tensors with one name.
    """
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for (category, name, size), number in (+Counter(items)).items():
        count, bytes = found.get(key := (category, starred(name)), (0, 0))
        found[key] = count + number, bytes + number * size
    held = (
        HeldTensors(category=category, name=name, count=count, bytes=bytes)
        for (category, name), (count, bytes) in found.items()
    )
    return tuple(sorted(held, key=lambda item: (-item.bytes, item.category, item.name)))
