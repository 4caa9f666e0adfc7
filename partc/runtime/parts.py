"""Parameters that ranks hold in parts (ZeRO): gathered for the calls that read them, gradients scattered back.

Both go on while a rank computes: a gather is started one call ahead, and a sum of gradients is added to a
rank's part when the next one starts, or at the step's end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from .comm import Axis, Comm, Pending, fill, join, split
from .layout import DTYPES, Shard, cutting

T = TypeVar("T")
Fields = Any  # the tuple class of a region's parameters, or one of it


class Parts:
    """The parameters of a stage: this rank's parts of some, the whole of others.

    What is gathered or scattered by one call of a method travels in one collective for each dtype; gradients
    in `wire`, if that is given.
    """

    def __init__(
        self,
        comm: Comm,
        shards: Mapping[str, Shard],
        held: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        *,
        wire: str = "",
    ) -> None:
        self._comm = comm
        self._wire = DTYPES[wire] if wire else None
        self._shards = shards
        self._held = held
        self._gradients = gradients
        axes = {axis for shard in shards.values() for axis in cutting(shard.dims)}
        sizes = {name: comm.group((name,)).size for name in axes}
        self._seams = {name: shard.seam(sizes) for name, shard in shards.items() if shard.gather}
        self._kept: dict[str, Tensor] = {}  # gathered, up to date after `refresh`
        self._sums: dict[str, Tensor] = {}  # gradients of the whole, until `scatter_sums`
        self._keeping: list[tuple[str, ...]] = []
        self._left: frozenset[str] = frozenset()
        self._going: list[Pending[None]] = []  # sums of gradients

    def unit(self, kind: Any, *names: str) -> Unit:
        return Unit(self, kind, names)

    def gather(self, *names: str) -> Pending[list[Tensor]]:
        """Start to gather the whole parameters, as calls read them."""
        return self._gather(names, {})

    def _gather(self, names: Sequence[str], into: Mapping[str, Tensor]) -> Pending[list[Tensor]]:
        """`into` has tensors for the whole that are there already."""
        whole = {name: self._held[name].to(self._shards[name].read_dtype) for name in names}
        going = []
        for axis, together in self._together({name: whole[name].dtype for name in names}):
            shapes = [whole[name].shape for name in together]
            flat = _joined([whole.pop(name).reshape(-1) for name in together])
            going.append((axis.size, together, shapes, axis.start_all_gather(flat, dim=0)))

        def finish() -> list[Tensor]:
            while going:
                ways, together, shapes, rows = going.pop(0)
                found = rows.wait().view(ways, -1)
                columns = found.split([shape.numel() for shape in shapes], dim=1)
                for name, shape, column in zip(together, shapes, columns, strict=True):
                    dim, outer = self._seams[name]
                    if name not in into and len(together) == 1:
                        whole[name] = join(column.view(ways, *shape), dim, outer)
                        continue
                    size = [ways * n if at == dim else n for at, n in enumerate(shape)]
                    whole[name] = into[name] if name in into else column.new_empty(size)
                    fill(whole[name], column.view(ways, *shape), dim, outer)
            return [whole[name] for name in names]

        return Pending(finish)

    def scatter(self, gradients: Mapping[str, Tensor]) -> None:
        """Start to add to each rank's part the sum of what all ranks have for it in these gradients of the whole.

        What a rank holds whole is added to its own.
        """
        self.settle()
        for name in gradients:
            if not self._shards[name].gather:
                self._gradients[name].add_(gradients[name])
        for axis, together in self._together({name: self._gradients[name].dtype for name in gradients}):
            rows = [split(gradients[name], axis.size, *self._seams[name]).reshape(axis.size, -1) for name in together]
            sizes = [row.shape[1] for row in rows]
            flat = _joined(rows, self._wire or self._gradients[together[0]].dtype).view(-1)
            sums = axis.start_reduce_scatter(flat, dim=0)
            self._going.append(sums.then(partial(self._add, together, sizes)))

    def settle(self) -> None:
        """Wait for the sums that have been started."""
        while self._going:
            self._going.pop(0).wait()

    def _add(self, names: Sequence[str], sizes: Sequence[int], sums: Tensor) -> None:
        for name, part in zip(names, sums.split(list(sizes)), strict=True):
            self._gradients[name].add_(part.view(self._gradients[name].shape))

    def keep(self, *names: str) -> list[Tensor]:
        """The whole parameters, in tensors that `refresh` brings up to date."""
        new = tuple(name for name in names if name not in self._kept)
        self._kept.update(zip(new, self.gather(*new).wait(), strict=True))
        self._keeping.append(new)
        return [self._kept[name] for name in names]

    def cast(self) -> dict[str, Tensor]:
        """Of what is kept, that which a rank holds whole and trains, and is read in other bits than it is held in."""
        return {
            name: x
            for name, x in self._kept.items()
            if x is not self._held[name] and name in self._gradients and not self._shards[name].gather
        }

    def leave(self, names: Collection[str]) -> None:
        """The update itself brings these of `cast` up to date."""
        self._left = frozenset(names)

    def refresh(self) -> None:
        """After the optimizer's update."""
        for name, x in self._kept.items():
            if not self._shards[name].gather and name not in self._left and x is not self._held[name]:
                x.copy_(self._held[name])
        parted = [tuple(name for name in names if self._shards[name].gather) for names in self._keeping]
        for _ in _ahead(partial(self._gather, names, self._kept) for names in parted):
            pass

    def sums(self, *names: str) -> list[Tensor | None]:
        """Gradients of the whole parameters, which `scatter_sums` scatters and clears."""
        new = [name for name in names if name not in self._sums and name in self._gradients]
        self._sums.update((name, self._whole_gradient(name)) for name in new)
        return [self._sums.get(name) for name in names]

    def scatter_sums(self, *names: str) -> None:
        """After a step's last microbatch: start to scatter these."""
        self.scatter({name: self._sums[name] for name in names})
        self._going.append(Pending(partial(self._clear, names)))

    def _clear(self, names: Sequence[str]) -> None:
        for name in names:
            self._sums[name].zero_()

    def _whole_gradient(self, name: str) -> Tensor:
        gradient, shard = self._gradients[name], self._shards[name]
        if not shard.gather:
            return gradient
        dim, _ = self._seams[name]
        shape = list(gradient.shape)
        shape[dim] *= self._comm.group(shard.gather).size
        return gradient.new_zeros(shape)

    def _together(self, moved: Mapping[str, torch.dtype]) -> Iterator[tuple[Axis, list[str]]]:
        """Names, of what ranks hold in parts, whose tensors can share a collective."""
        found: dict[tuple[tuple[str, ...], torch.dtype], list[str]] = {}
        for name, dtype in moved.items():
            if self._shards[name].gather:
                found.setdefault((self._shards[name].gather, dtype), []).append(name)
        for (axes, _), together in found.items():
            yield self._comm.group(axes), together


class Unit:
    """The parameters of one call."""

    def __init__(self, parts: Parts, kind: Any, names: tuple[str, ...]) -> None:
        self._parts = parts
        self._kind = kind
        self._names = names

    def gather(self) -> Pending[Fields]:
        """Start to gather the whole parameters."""
        return self._parts.gather(*self._names).then(lambda whole: self._kind(*whole))

    def scatter(self, gradients: Fields) -> None:
        """Start to hand gradients of the whole parameters to the ranks that hold the parts."""
        named = zip(self._names, gradients, strict=True)
        self._parts.scatter({name: gradient for name, gradient in named if gradient is not None})


def _joined(rows: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Side by side, and contiguous; of one dtype if none is given."""
    if len(rows) == 1:
        return rows[0].contiguous().to(dtype or rows[0].dtype)
    sizes = [row.shape[-1] for row in rows]
    joined = rows[0].new_empty((*rows[0].shape[:-1], sum(sizes)), dtype=dtype)
    for place, row in zip(joined.split(sizes, -1), rows, strict=True):
        place.copy_(row)
    return joined


def ahead(*units: Unit) -> Iterator[Fields]:
    """The whole parameters of each in turn. The first gather starts at once, the others one unit ahead."""
    return _ahead(iter([unit.gather for unit in units]))


def _ahead(starts: Iterator[Callable[[], Pending[T]]]) -> Iterator[T]:
    return _taken([start() for start in islice(starts, 1)], starts)


def _taken(going: list[Pending[T]], starts: Iterator[Callable[[], Pending[T]]]) -> Iterator[T]:
    # Nothing here keeps a hold of what was taken: it goes when the call that took it is over.
    while going:
        whole = [going.pop().wait()]
        going += [start() for start in islice(starts, 1)]
        yield whole.pop()
