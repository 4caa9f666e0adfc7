"""Collectives over ranks of which some share a node: inside nodes and between them, one after the other.

What is gathered crosses nodes first, each rank's part to the ranks in its place on other nodes, and then goes around
inside: every byte comes to a node once. What is scattered is summed inside nodes first, so that a part of it crosses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from .comm import Axis, Comm, Pending, split


@dataclass(frozen=True, slots=True)
class Levels:
    """The ranks that differ from this one on some axes: those in its place on other nodes, and those of its node.

    A rank's place among all counts nodes first. Where all share a node, or none do, one of the two is this rank alone.
    """

    far: Axis
    near: Axis

    @classmethod
    def of(cls, comm: Comm, axes: Sequence[str], near: Sequence[str]) -> Levels:
        """`near` are axes whose ranks share a node."""
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
        """The axis over which whole tensors travel without copies, if there is one level and its backend can."""
        axis = self.near if self.far.size == 1 else self.far
        return axis if axis.moves_many and not self.both else None

    def split(self, x: Tensor, dim: int, outer: int) -> Tensor:
        """What `comm.split` cuts a tensor in, as it is scattered: [near, far, elements of a part]."""
        return split(x, self.size, dim, outer).reshape(self.far.size, self.near.size, -1).transpose(0, 1)

    def place(self, parts: Tensor, whole: Tensor, dim: int, outer: int) -> None:
        """What was gathered, [near, far, ...], side by side into a tensor for the whole (see `comm.join`)."""
        rest = parts.shape[dim + 2] // outer
        places = whole.unflatten(dim, (outer, self.far.size, self.near.size, rest))
        places.movedim((dim + 2, dim + 1), (0, 1)).copy_(parts.unflatten(dim + 2, (outer, rest)))

    def start_all_gather(self, part: Tensor) -> Pending[Tensor]:
        """A flat tensor of every rank: [near, far, elements]."""
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
        """This rank's part of the sum of [near, far, elements].

        `across` does it between nodes, of [far * elements].
        """
        between = across or (lambda x: self.far.start_reduce_scatter(x, dim=0))
        if self.near.size == 1:
            return between(rows.view(-1))
        inside = self.near.start_reduce_scatter(rows.view(-1), dim=0)
        return inside if self.far.size == 1 else _in_turns(inside, between)


def _in_turns(first: Pending[Tensor], second: Callable[[Tensor], Pending[Tensor]]) -> Pending[Tensor]:
    """Two collectives, of which the second takes what the first one brings."""
    waiting, going = [first], list[Pending[Tensor]]()

    def go_on() -> bool:
        if not waiting:
            return False
        going.append(second(waiting.pop().wait()))
        return True

    def finish() -> Tensor:
        go_on()
        return going.pop().wait()

    return Pending(finish, go_on)
