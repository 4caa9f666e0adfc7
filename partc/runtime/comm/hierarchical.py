"""Hierarchical collectives over ranks on several nodes: inside nodes and between them, in sequence.

A gather crosses nodes first, from each rank to its counterparts on other nodes, and then runs inside nodes: every byte
enters a node once. A scatter sums inside nodes first, so that only a part crosses nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from .comm import Axis, Comm, Pending, split


@dataclass(frozen=True, slots=True)
class Levels:
    """The ranks that differ from this one on some axes, as two groups: its counterparts on other nodes, and those on
    its own node.

    A rank's index counts nodes first. If all ranks share a node, or none do, one of the two groups is this rank alone.
    """

    far: Axis
    near: Axis

    @classmethod
    def of(cls, comm: Comm, axes: Sequence[str], near: Sequence[str]) -> Levels:
        """The levels of `axes`; `near` are the axes whose ranks share a node."""
        inside = tuple(axis for axis in axes if axis in near)
        outside = tuple(axis for axis in axes if axis not in near)
        return cls(comm.group(outside) if outside else Axis(), comm.group(inside) if inside else Axis())

    @property
    def size(self) -> int:
        return self.far.size * self.near.size

    @property
    def both(self) -> bool:
        return min(self.far.size, self.near.size) > 1

    @property
    def direct(self) -> Axis | None:
        """The axis that can move whole tensors without copies, if there is one level and its backend supports this."""
        axis = self.near if self.far.size == 1 else self.far
        return axis if axis.moves_many and not self.both else None

    def split(self, x: Tensor, dim: int, outer: int) -> Tensor:
        """The parts of a tensor for a scatter (see `comm.split`): [near, far, elements of a part]."""
        return split(x, self.size, dim, outer).reshape(self.far.size, self.near.size, -1).transpose(0, 1)

    def place(self, parts: Tensor, whole: Tensor, dim: int, outer: int) -> None:
        """Join gathered parts, [near, far, ...], into a whole tensor (see `comm.join`)."""
        rest = parts.shape[dim + 2] // outer
        if whole.shape[dim] != outer * self.size * rest:
            self._place_without_spare(parts, whole.unflatten(dim, (outer, -1)), dim + 1, rest)
            return
        places = whole.unflatten(dim, (outer, self.far.size, self.near.size, rest))
        places.movedim((dim + 2, dim + 1), (0, 1)).copy_(parts.unflatten(dim + 2, (outer, rest)))

    def _place_without_spare(self, parts: Tensor, whole: Tensor, dim: int, rest: int) -> None:
        """Join parts without their spare elements: copy all full parts at once, then the rest of the next part."""
        start, length = 0, whole.shape[dim]
        for row in parts.unbind(1) if self.both else (parts.flatten(0, 1),):
            row = row.unflatten(dim, (-1, rest))
            full = min(len(row), (length - start) // rest)
            if full:
                places = whole.narrow(dim, start, full * rest).unflatten(dim, (full, rest))
                places.movedim(dim, 0).copy_(row[:full])
            start += full * rest
            if full < len(row) and start < length:
                whole.narrow(dim, start, length - start).copy_(row[full].narrow(dim, 0, length - start))
                start = length

    def start_all_gather(self, part: Tensor) -> Pending[Tensor]:
        """Start the gather of a flat tensor of every rank: [near, far, elements]."""
        if self.far.size == 1:
            whole = self.near.start_all_gather(part, dim=0)
        elif self.near.size == 1:
            whole = self.far.start_all_gather(part, dim=0)
        else:
            whole = _in_turns(self.far.start_all_gather(part, dim=0), lambda x: self.near.start_all_gather(x, dim=0))
        return whole.then(lambda x: x.view(self.near.size, self.far.size, -1))

    def start_reduce_scatter(
        self, rows: Tensor, across: Callable[[Tensor], Pending[Tensor]] | None = None
    ) -> Pending[Tensor]:
        """Start the sum of [near, far, elements], of which this rank receives its part.

        `across` is the collective between nodes, of [far * elements].
        """
        between = across or (lambda x: self.far.start_reduce_scatter(x, dim=0))
        if self.near.size == 1:
            return between(rows.view(-1))
        inside = self.near.start_reduce_scatter(rows.view(-1), dim=0)
        return inside if self.far.size == 1 else _in_turns(inside, between)


def _in_turns(first: Pending[Tensor], second: Callable[[Tensor], Pending[Tensor]]) -> Pending[Tensor]:
    """Two collectives in sequence: the second reads the result of the first."""
    waiting, going = [first], list[Pending[Tensor]]()

    def advance() -> None:
        going.append(second(waiting.pop().wait()))

    return Pending(lambda: going.pop().wait(), advance)
