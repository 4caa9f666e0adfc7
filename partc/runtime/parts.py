"""Parameters that ranks hold in parts (ZeRO): gathered for the calls that read them, gradients scattered back.

Both go on while a rank computes: a gather is started one call ahead, whichever action that call is of, and a sum of
gradients is added to a rank's part when the next one starts, or at the step's end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby, islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from .accumulation import Gradient, clear, settled
from .comm import Axis, Comm, Pending, join
from .compression import Codec, Scattered
from .layout import DTYPES, Shard, cutting
from .levels import Levels

T = TypeVar("T")
Fields = Any  # the tuple class of a region's parameters, or one of it


class Parts:
    """The parameters of a stage: this rank's parts of some, the whole of others.

    What is gathered or scattered by one call of a method travels in one collective for each dtype; gradients
    in `wire`, if that is given. Over ranks of which those on the axes `near` share a node, where others don't, it
    goes inside nodes and between them in turn (see levels). `compress` is what gradients travel in between nodes, or
    everywhere if `near` is empty.
    """

    def __init__(
        self,
        comm: Comm,
        shards: Mapping[str, Shard],
        held: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        *,
        near: tuple[str, ...] = (),
        wire: str = "",
        compress: str | Codec = "",
    ) -> None:
        self._comm = comm
        self._near = near
        self._compress = compress
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
        self.compressed = dict(self._compressing()) if compress else {}

    def _compressing(self) -> Iterator[tuple[str, Scattered]]:
        for name, gradient in self._gradients.items():
            levels = Levels.of(self._comm, self._shards[name].gather, self._near)
            if levels.far.size > 1:
                yield name, Scattered(levels.far.size, gradient.numel())

    @property
    def turns(self) -> int:
        """In how many what is gathered comes: one, or two where some of the ranks share a node."""
        gathered = {shard.gather for shard in self._shards.values() if shard.gather}
        return max((1 + Levels.of(self._comm, axes, self._near).both for axes in gathered), default=1)

    def unit(self, kind: Any, *names: str) -> Unit:
        return Unit(self, kind, names)

    def gather(self, *names: str) -> Pending[list[Tensor]]:
        """Start to gather the whole parameters, as calls read them."""
        return self._gather(names, {})

    def _gather(self, names: Sequence[str], into: Mapping[str, Tensor]) -> Pending[list[Tensor]]:
        """`into` has tensors for the whole that are there already."""
        whole = {name: self._held[name].to(self._shards[name].read_dtype) for name in names}
        going = []
        direct: list[Pending[None]] = []
        for levels, together in self._together({name: whole[name].dtype for name in names}):
            if (axis := self._direct(levels, together)) is not None:
                parts = {name: whole[name] for name in together}
                for name, x in parts.items():
                    whole[name] = into[name] if name in into else x.new_empty((levels.size * len(x), *x.shape[1:]))
                places = [whole[name] for name in together]
                direct.append(axis.start_all_gather_many(list(parts.values()), places))
                continue
            shapes = [whole[name].shape for name in together]
            flat = _joined([whole.pop(name).reshape(-1) for name in together])
            going.append((levels, together, shapes, levels.start_all_gather(flat)))
            del flat

        def finish() -> list[Tensor]:
            go_on()
            while direct:
                direct.pop(0).wait()
            while going:
                levels, together, shapes, rows = going.pop(0)
                columns = rows.wait().split([shape.numel() for shape in shapes], dim=2)
                for name, shape, column in zip(together, shapes, columns, strict=True):
                    dim, outer = self._seams[name]
                    parts = column.view(levels.near.size, levels.far.size, *shape)
                    if name not in into and len(together) == 1 and not levels.both:
                        whole[name] = join(parts.flatten(0, 1), dim, outer)
                        continue
                    size = [levels.size * n if at == dim else n for at, n in enumerate(shape)]
                    whole[name] = into[name] if name in into else column.new_empty(size)
                    levels.place(parts, whole[name], dim, outer)
            return [whole[name] for name in names]

        def go_on() -> bool:
            return any([rows.go_on() for _, _, _, rows in going])

        return Pending(finish, go_on)

    def scatter(self, gradients: Mapping[str, Tensor]) -> None:
        """Start to add to each rank's part the sum of what all ranks have for it in these gradients of the whole.

        What a rank holds whole is added to its own. Of what has been started before, sums inside nodes go on to
        what is between them, and the others are waited for.
        """
        for going in self._taken():
            if going.go_on():
                self._going.append(going)
            else:
                going.wait()
        for name in gradients:
            if not self._shards[name].gather:
                self._gradients[name].add_(gradients[name])
        for levels, together in self._together({name: self._gradients[name].dtype for name in gradients}):
            dtype = self._wire or self._gradients[together[0]].dtype
            if not self.compressed and (axis := self._direct(levels, together)) is not None:
                scattered = axis.start_reduce_scatter_many([gradients[name].to(dtype) for name in together])
                self._going.append(scattered.then(partial(self._add_each, together)))
                continue
            rows = [levels.split(gradients[name], *self._seams[name]) for name in together]
            sizes = [row.shape[2] for row in rows]
            flat = _joined(rows, dtype)
            del rows
            across = partial(self._across, levels.far, together) if self.compressed else None
            self._going.append(levels.start_reduce_scatter(flat, across).then(partial(self._add, together, sizes)))

    def _across(self, nodes: Axis, names: Sequence[str], x: Tensor) -> Pending[Tensor]:
        """Scatter between nodes, in few bits."""
        return Scattered.start(self._compress, nodes, [self.compressed[name] for name in names], x, self._comm.scale)

    def go_on(self) -> None:
        """Have sums inside nodes go on between them."""
        _go_on(self._going)

    def settle(self) -> None:
        """Wait for the sums that have been started."""
        self.go_on()
        for going in self._taken():
            going.wait()

    def _taken(self) -> Iterator[Pending[None]]:
        """The sums that have been started, each let go of as it is taken."""
        for _ in range(len(self._going)):
            yield self._going.pop(0)

    def _add(self, names: Sequence[str], sizes: Sequence[int], sums: Tensor) -> None:
        for name, part in zip(names, sums.split(list(sizes)), strict=True):
            self._gradients[name].add_(part.view(self._gradients[name].shape))

    def _add_each(self, names: Sequence[str], parts: Sequence[Tensor]) -> None:
        for name, part in zip(names, parts, strict=True):
            self._gradients[name].add_(part)

    def _direct(self, levels: Levels, names: Sequence[str]) -> Axis | None:
        """The axis over which these travel without copies: ranks hold consecutive rows of each of them."""
        return levels.direct if all(self._seams[name] == (0, 1) for name in names) else None

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
        for _ in _ahead([(partial(self._gather, names, self._kept), 1) for names in parted], self.turns):
            pass

    def sums(self, *names: str) -> list[Tensor | None]:
        """Gradients of the whole parameters, which `scatter_sums` scatters and clears."""
        new = [name for name in names if name not in self._sums and name in self._gradients]
        self._sums.update((name, self._whole_gradient(name)) for name in new)
        return [self._sums.get(name) for name in names]

    def scatter_sums(self, *names: str) -> None:
        """After a step's last microbatch: start to scatter these."""
        self.scatter({name: settled(self._sums[name]) for name in names})
        self._going.append(Pending(partial(self._clear, names)))

    def _clear(self, names: Sequence[str]) -> None:
        clear(self._sums[name] for name in names)

    def _whole_gradient(self, name: str) -> Tensor:
        gradient, shard = self._gradients[name], self._shards[name]
        if not shard.gather:
            return gradient
        dim, _ = self._seams[name]
        shape = list(gradient.shape)
        shape[dim] *= Levels.of(self._comm, shard.gather, self._near).size
        whole = gradient.new_zeros(shape)
        return Gradient.of(whole) if isinstance(gradient, Gradient) else whole

    def _together(self, moved: Mapping[str, torch.dtype]) -> Iterator[tuple[Levels, list[str]]]:
        """Names, of what ranks hold in parts, whose tensors can share a collective."""
        found: dict[tuple[tuple[str, ...], torch.dtype], list[str]] = {}
        for name, dtype in moved.items():
            if self._shards[name].gather:
                found.setdefault((self._shards[name].gather, dtype), []).append(name)
        for (axes, _), together in found.items():
            yield Levels.of(self._comm, axes, self._near), together


class Unit:
    """The parameters of one call."""

    def __init__(self, parts: Parts, kind: Any, names: tuple[str, ...]) -> None:
        self._parts = parts
        self._kind = kind
        self._names = names

    @property
    def turns(self) -> int:
        return self._parts.turns

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


def ahead(*units: Unit | None) -> Iterator[Fields]:
    """The whole parameters of each in turn. The first gather starts at once, the others one unit ahead.

    Where nodes are crossed, that is what goes on inside them; what crosses starts another unit ahead. What is read
    several times in a row is gathered once. What comes after None is not gathered before it is taken.
    """
    turns = max((unit.turns for unit in units if unit is not None), default=1)
    groups = [list(group) for between, group in groupby(units, key=lambda unit: unit is None) if not between]
    runs = [[[*run] for _, run in groupby(group, key=id)] for group in groups]
    gathers = [[(run[0].gather, len(run)) for run in group if run[0] is not None] for group in runs]
    first = _ahead(gathers[0], turns) if gathers else iter(())
    return chain(first, chain.from_iterable(_ahead(group, turns) for group in gathers[1:]))


_Gather = Callable[[], Pending[T]]


def _ahead(gathers: Iterable[tuple[_Gather[T], int]], turns: int) -> Iterator[T]:
    """What each gather brings, so many times."""
    starts = iter(gathers)
    return _in_order([(start(), times) for start, times in islice(starts, turns)], starts)


def _in_order(going: list[tuple[Pending[T], int]], starts: Iterator[tuple[_Gather[T], int]]) -> Iterator[T]:
    # Nothing here keeps a hold of what was taken for the last time: it goes when the call that took it is over.
    while going:
        times = going[0][1]
        whole = [going.pop(0)[0].wait()]
        for _ in range(times - 1):
            yield whole[0]
        _go_on(coming for coming, _ in going)
        going += [(start(), times) for start, times in islice(starts, 1)]
        yield whole.pop()


def _go_on(going: Iterable[Pending[T]]) -> None:
    for each in going:
        each.go_on()
