"""Disjoint sets: names that belong together, each set with one of them as its representative."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class DisjointSets(Generic[Name]):
    """A name that was never joined is a set by itself."""

    def __init__(self) -> None:
        self._parents: dict[Name, Name] = {}

    def of(self, name: Name) -> Name:
        """The representative of the name's set."""
        parents = self._parents
        parents.setdefault(name, name)
        while parents[name] != name:
            parents[name] = parents[parents[name]]
            name = parents[name]
        return name

    def join(self, one: Name, other: Name) -> None:
        """Join two sets; the representative is that of `one`."""
        self._parents[self.of(other)] = self.of(one)

    def representatives(self) -> dict[Name, Name]:
        """Every name that was asked for or joined, with its representative."""
        return {name: self.of(name) for name in list(self._parents)}
