"""What a rank's memory holds in a step: the most bytes at one time, what they are, and how they come and go.

The account has one entry for each coordinate on the pipeline axis: ranks that differ on other axes alone hold as much.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from partc.errors import PartcError
from partc.naming import is_number
from partc.printer import readable
from partc.runtime.documents import Malformed, Natural, Positive, decoded

# In the order in which they are shown: what lasts, what a step brings, what passes.
CATEGORIES = (
    "parameters", "copies", "gradients", "optimizer", "constants", "batch", "activations", "temporaries",
    "communication",
)  # fmt: skip

# What a GPU holds of a process beside its tensors: CUDA's context (0.5 GiB), libraries' work spaces and NCCL's
# communicators (some 0.1 GiB each). An estimate, which the account shows and does not count.
RESERVE = 2 << 30


def _category(name: str) -> str:
    return "" if name in CATEGORIES else f"none of {', '.join(CATEGORIES)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Tensors of one name that are there at one time: so many of them, with so many bytes in all."""

    category: Annotated[str, _category]
    name: str  # of a parameter, with stars for numbers; or of a value, after its region's: "block.attn_q"
    count: Positive
    bytes: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in a step something is: the action, the call and the line of the stage's module, with its operation."""

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
    """An action of a step: the most bytes held during it, and those held when it ends."""

    action: str
    peak: Natural
    after: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Of the ranks at one coordinate on the pipeline axis."""

    place: Natural
    stages: tuple[Natural, ...]
    peak: Natural
    at: Place
    alive: tuple[Held, ...]  # at the peak, the largest first
    timeline: tuple[Moment, ...]
    host: Natural = 0  # that `train.py --save` holds besides, in host memory: a copy of what this rank writes

    @property
    def categories(self) -> dict[str, int]:
        """The peak's bytes, by what they are."""
        found = dict.fromkeys(CATEGORIES, 0)
        for item in self.alive:
            found[item.category] += item.bytes
        return {name: size for name, size in found.items() if size}


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Of all ranks, in a step after the first: with the optimizer's state, of the optimizer that is named."""

    optimizer: str
    ranks: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        """The rank that holds most at one time; the first of several."""
        return max(self.ranks, key=lambda rank: rank.peak)

    def __str__(self) -> str:
        """The rank that holds most: how much, of what, and where."""
        worst = self.worst
        rank = f"pipeline rank {worst.place}, " if len(self.ranks) > 1 else ""
        return f"{readable(worst.peak)} ({rank}at {worst.at.action}): {consists(worst)}"

    @property
    def summary(self) -> dict[str, Any]:
        """Each pipeline rank's peak, and what the largest of them consists of."""
        return {"peaks": [rank.peak for rank in self.ranks], "categories": self.worst.categories}

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def of(cls, document: Any) -> Account:
        """From what `document` gave. Raises PartcError P0506 for anything else."""
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


def consists(rank: RankMemory) -> str:
    """What a rank's peak is made of, the most first."""
    parts = sorted(rank.categories.items(), key=lambda item: -item[1])
    return ", ".join(f"{readable(size)} {name}" for name, size in parts)


def together(items: Iterable[tuple[str, str, int]]) -> tuple[Held, ...]:
    """Category, name and bytes of single tensors -> those of one name together, the largest first.

    Numbers in names are stars: blocks.0.mlp.up.weight and blocks.1.mlp.up.weight are two of one name.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for category, name, size in items:
        starred = ".".join("*" if is_number(part) else part for part in name.split("."))
        found.setdefault((category, starred), []).append(size)
    held = (
        Held(category=category, name=name, count=len(sizes), bytes=sum(sizes))
        for (category, name), sizes in found.items()
    )
    return tuple(sorted(held, key=lambda item: (-item.bytes, item.category, item.name)))
