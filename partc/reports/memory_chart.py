"""The chart of a rank's memory over a step: one stack of categories for each action, and a legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partc.cost.memory import Account
from partc.ir.printer import readable

WIDTH, HEIGHT = 1000.0, 190.0  # in pixels
MOST_STACKS = 250  # of more actions, groups are drawn by their fullest action
# From bottom to top: permanent, for the length of a step, temporary.
KINDS: Mapping[str, tuple[str, ...]] = {
    "parameters": ("parameters", "copies"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "saved activations": ("activations",),
    "temporaries": ("temporaries",),
    "buffers": ("communication", "constants", "batch"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A rectangle of a stack, and the number of its category."""

    kind: int
    y: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The drawn peak of an action."""

    x: float
    width: float
    hover: str
    layers: tuple[Layer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The picture of a step of the rank with the highest peak."""

    title: str
    width: float
    height: float
    stacks: tuple[Stack, ...]
    legend: tuple[tuple[str, str], ...]  # kinds, and their bytes at the peak


def stacked(account: Account, actions: Sequence[tuple[str, Mapping[str, int]]]) -> Picture:
    """Draw the peak of every action by category, for the account's worst rank."""
    worst = account.worst
    most = _by_kind(worst.categories)
    each = -(-len(actions) // MOST_STACKS)
    shown = [
        max(actions[start : start + each], key=lambda item: sum(item[1].values()))
        for start in range(0, len(actions), max(each, 1))
    ]
    width = WIDTH / max(len(shown), 1)
    rank = f"pipeline rank {worst.place}" if len(account.ranks) > 1 else "every rank"
    return Picture(
        title=f"{rank} holds {readable(worst.peak)} at most, in {worst.at.action}",
        width=WIDTH,
        height=HEIGHT,
        stacks=tuple(
            Stack(
                x=round(index * width, 2),
                width=round(width, 2),
                hover=_hover(action, sizes),
                layers=_layers(sizes, worst.peak),
            )
            for index, (action, sizes) in enumerate(shown)
        ),
        legend=tuple((kind, readable(size)) for kind, size in most.items()),
    )


def _by_kind(sizes: Mapping[str, int]) -> dict[str, int]:
    return {kind: sum(sizes.get(name, 0) for name in names) for kind, names in KINDS.items()}


def _hover(action: str, sizes: Mapping[str, int]) -> str:
    parts = [f"{readable(size)} {kind}" for kind, size in _by_kind(sizes).items() if size]
    return f"{action}: {readable(sum(sizes.values()))}\n" + "\n".join(parts)


def _layers(sizes: Mapping[str, int], peak: int) -> tuple[Layer, ...]:
    found, below = [], 0
    for number, size in enumerate(_by_kind(sizes).values()):
        if size:
            below += size
            found.append(
                Layer(kind=number, y=round(HEIGHT * (1 - below / peak), 2), height=round(HEIGHT * size / peak, 2))
            )
    return tuple(found)
