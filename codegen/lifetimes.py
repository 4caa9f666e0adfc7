"""The values that a function deletes before it ends, and the places of the deletions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from partc.ir.layout import Sizes
from partc.ir.program import VIEWS, Graph, Op, Ref

# Operations of ATen and of partc whose results may alias their first operand.
_SIGHTS = frozenset({
    "to", "take", "detach", "contiguous", "diagonal", "unfold", "select", "narrow", "squeeze", "unsqueeze", "t",
    "transpose", "view", "view_as", "movedim", "as_strided", "unbind", "chunk", "real", "imag", "flatten",
})  # fmt: skip
# A peak this close to the lowest one is not worth another line.
_CLOSE = 1.1


@dataclass(slots=True)
class _Storage:
    """The memory behind a value and its views, from the operation that makes it to its last reader."""

    names: list[str]
    size: int
    made: int
    last: int


def shares_memory(op: Op) -> bool:
    """Whether an operation's result may alias its first operand."""
    return op.name in VIEWS or op.name in _SIGHTS


def overwritten(op: Op) -> dict[int, int]:
    """Index of a result -> index of the argument that it overwrites."""
    over = dict(op.attrs).get("over")
    return {int(str(over[1])): int(str(over[0]))} if isinstance(over, tuple) else {}


def deletions(graph: Graph, keep: Collection[str], sizes: Sizes) -> dict[int, tuple[str, ...]]:
    """Index of an operation -> values to delete right after it: the fewest that minimise the peak.

    A name is deleted together with all its views. Values in `keep` live on: the function's outputs, and inputs that its
    caller holds anyway.
    """
    storages = _storages(graph)
    for storage, size in zip(storages, _sizes(graph, storages, sizes), strict=True):
        storage.size = size
    free = [storage for storage in storages if not set(keep) & set(storage.names)]
    deleted: list[_Storage] = []
    lowest, _ = _peak(storages, free, len(graph.ops))
    while True:
        peak, at = _peak(storages, deleted, len(graph.ops))
        idle = [storage for storage in free if storage not in deleted and storage.made <= at and storage.last < at]
        if peak <= lowest * _CLOSE or not idle:
            break
        deleted.append(max(idle, key=lambda storage: storage.size))
    found: dict[int, tuple[str, ...]] = {}
    for storage in sorted(deleted, key=lambda storage: storage.made):
        found[storage.last] = (*found.get(storage.last, ()), *storage.names)
    return found


def _storages(graph: Graph) -> list[_Storage]:
    owner = {value.name: _Storage([value.name], 0, -1, -1) for value in graph.inputs}
    storages = list(owner.values())
    for index, op in enumerate(graph.ops):
        for name in op.refs():
            if name in owner:
                owner[name].last = index
        for value in op.results:
            shown = op.args[0].name if op.name in VIEWS and isinstance(op.args[0], Ref) else ""
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


def _peak(storages: list[_Storage], deleted: list[_Storage], count: int) -> tuple[int, int]:
    """The largest number of bytes held while any operation runs, and the first such operation."""
    changes = [0] * (count + 2)
    for storage in storages:
        changes[max(storage.made, 0)] += storage.size
        if storage in deleted:
            changes[storage.last + 1] -= storage.size
    held, peak, at = 0, -1, 0
    for index in range(count):
        held += changes[index]
        if held > peak:
            peak, at = held, index
    return peak, at
