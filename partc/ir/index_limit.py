"""Integers of the batch that are indices: into the rows of tables, the classes of losses, the places of gathers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexLimit:
    """A read of an integer entry, in which each number is at least `least` and below `below`, or `ignored`.

    `part` has (dimension, start, stop) for each dimension of which a slice is read; None if the part is unknown.
    """

    below: int
    least: int = 0
    ignored: int | None = None
    part: tuple[tuple[int, int, int], ...] | None = ()
