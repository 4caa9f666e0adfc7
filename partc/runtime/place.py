"""One rank among all: its coordinate on the mesh, its groups and links, from the module of its pipeline coordinate."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PIPELINE = "pp"
Link = tuple[int, int]  # from stage, to stage


def _imported(place: int) -> Any:
    """The module of a pipeline coordinate, from the package on Python's path."""
    return importlib.import_module(f"ranks.pp_{place}")


def stacked_names(name: str, count: int) -> tuple[str, ...]:
    """The names of the parameters that are rows of a stack: `experts.*.up` has the rows `experts.0.up`,
    `experts.1.up`.
    """
    return tuple(name.replace("*", str(number)) for number in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The facts that one rank needs about itself."""

    rank: int
    coordinate: Mapping[str, int]
    stages: tuple[int, ...]
    groups: Mapping[str, tuple[int, ...]]
    links: Mapping[Link, int]  # link -> the rank at the other end
    schedule: str
    evaluation: str
    schedules: Mapping[int, str]  # the schedules of the pipeline ranks at the other ends of links

    @classmethod
    def of(cls, rank: int, sizes: Mapping[str, int], module: Callable[[int], Any] = _imported) -> Place:
        """The place of a rank on a mesh with these sizes; `module(place)` returns the module of a pipeline
        coordinate.
        """
        here = coordinate(rank, sizes)
        mine = module(here.get(PIPELINE, 0))
        return cls(
            rank=rank,
            coordinate=here,
            stages=mine.STAGES,
            groups={name: members(name, here, sizes) for name in mine.GROUPS},
            links={link: rank_at({**here, PIPELINE: other}, sizes) for link, other in mine.LINKS.items()},
            schedule=mine.SCHEDULE,
            evaluation=getattr(mine, "EVALUATION", ""),
            schedules={other: module(other).SCHEDULE for other in set(mine.LINKS.values())},
        )


def coordinate(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """The coordinate of a rank; the last axis varies fastest."""
    found: dict[str, int] = {}
    for name, size in reversed([*sizes.items()]):
        rank, found[name] = divmod(rank, size)
    return {name: found[name] for name in sizes}


def rank_at(coordinate: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    rank = 0
    for name, size in sizes.items():
        rank = rank * size + coordinate[name]
    return rank


def members(group: str, coordinate: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The ranks of a rank's group: in `dp_out,dp_in` they differ along these axes, in `pp 0,3` they have these
    coordinates on pp.
    """
    axes: dict[str, Sequence[int]]
    if group.startswith(f"{PIPELINE} "):
        axes = {PIPELINE: [int(each) for each in group.removeprefix(f"{PIPELINE} ").split(",")]}
    else:
        axes = {name: range(size) for name, size in sizes.items() if name in group.split(",")}
    places = (dict(zip(axes, place, strict=True)) for place in itertools.product(*axes.values()))
    return tuple(rank_at({**coordinate, **place}, sizes) for place in places)
