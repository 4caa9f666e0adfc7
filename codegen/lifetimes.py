"""The values that a function deletes before it returns, and where."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from partc.ir.layout import Sizes
from partc.ir.operations import SHOWING
from partc.ir.program import Graph, Op, Ref

# Another `del` is not worth a peak that is lower by less than this share.
_CLOSE = 1.1


@dataclass(slots=True)
class _Storage:
    """The memory behind a value and its views, from the operation that computes it to its last reader."""

    names: list[str]
    size: int
    made: int
    last: int


def overwritten(op: Op) -> dict[int, int]:
    """Index of a result -> index of the argument that it overwrites."""
    over = dict(op.attrs).get("over")
    return {int(str(over[1])): int(str(over[0]))} if isinstance(over, tuple) else {}


def deletions(graph: Graph, keep: Collection[str], sizes: Sizes) -> dict[int, tuple[str, ...]]:
    """Index of an operation -> values to delete right after it: the fewest that minimise the peak.

    A name is deleted together with all its views. Values in `keep` are not deleted: the function's outputs, and inputs
    that its caller holds anyway.
    """
    storages = _storages(graph)
    for storage, size in zip(storages, _sizes(graph, storages, sizes), strict=True):
        storage.size = size
    account = _Account(storages, len(graph.ops))
    kept = set(keep)
    free = np.array([kept.isdisjoint(storage.names) for storage in storages], dtype=bool)
    lowest, _ = account.without(free)
    deleted: list[_Storage] = []
    while True:
        peak, at = account.peak()
        idle = free & (account.made <= at) & (account.last < at)
        if peak <= lowest * _CLOSE or not idle.any():
            break
        largest = int(np.argmax(np.where(idle, account.size, -1)))
        free[largest] = False
        account.delete(largest)
        deleted.append(storages[largest])
    found: dict[int, tuple[str, ...]] = {}
    for storage in sorted(deleted, key=lambda storage: storage.made):
        found[storage.last] = (*found.get(storage.last, ()), *storage.names)
    return found


class _Account:
    """The bytes that are held while each of `count` operations runs."""

    def __init__(self, storages: list[_Storage], count: int) -> None:
        self.made, self.last, self.size = (
            np.array([getattr(storage, name) for storage in storages], dtype=np.int64)
            for name in ("made", "last", "size")
        )
        self._count = count
        self._changes = np.zeros(count + 2, dtype=np.int64)
        np.add.at(self._changes, np.maximum(self.made, 0), self.size)

    def peak(self) -> tuple[int, int]:
        """The largest number of bytes held while any operation runs, and the first such operation."""
        return self._peak(self._changes)

    def without(self, chosen: np.ndarray) -> tuple[int, int]:
        """The peak if the chosen storages are deleted right after their last readers."""
        changes = self._changes.copy()
        np.subtract.at(changes, self.last[chosen] + 1, self.size[chosen])
        return self._peak(changes)

    def delete(self, index: int) -> None:
        self._changes[self.last[index] + 1] -= self.size[index]

    def _peak(self, changes: np.ndarray) -> tuple[int, int]:
        if not self._count:
            return 0, 0
        held = np.cumsum(changes[: self._count])
        at = int(np.argmax(held))
        return int(held[at]), at


def _storages(graph: Graph) -> list[_Storage]:
    owner = {value.name: _Storage([value.name], 0, -1, -1) for value in graph.inputs}
    storages = list(owner.values())
    for index, op in enumerate(graph.ops):
        for name in op.refs():
            if name in owner:
                owner[name].last = index
        for value in op.results:
            shown = op.args[0].name if op.name in SHOWING and isinstance(op.args[0], Ref) else ""
            if shown in owner:
                owner[shown].names.append(value.name)
                owner[shown].last = index
                owner[value.name] = owner[shown]
            elif not shown:
                owner[value.name] = _Storage([value.name], 0, index, index)
                storages.append(owner[value.name])
    return storages


def _sizes(graph: Graph, storages: list[_Storage], sizes: Sizes) -> list[int]:
    values = graph.definitions()
    return [values[storage.names[0]].type.local_bytes(sizes) for storage in storages]
