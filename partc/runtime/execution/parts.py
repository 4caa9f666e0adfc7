"""Sharded parameters (ZeRO): units gather them for calls and scatter the gradients back.

The stage modules decide when a unit gathers, waits and frees.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.comm import Axis, Comm, Pending, join
from ..comm.compression import Codec, Scattered
from ..comm.hierarchical import Levels
from ..layout import DTYPES, Seam, Shard, cutting, extended
from ..ops.accumulation import Gradient, clear, materialized

Fields = Any  # the tuple class of a region's parameters, or an instance


class Parts:
    """The parameters of a stage: this rank's parts of some, the whole of others.

    A unit gathers or scatters its tensors in one collective for each dtype; gradients travel in `wire` if it is given.
    If only the ranks along the axes `near` share a node, an exchange has two levels: inside nodes and between them (see
    Levels). Parts may end with spare elements, which are zeros: they travel, but calls do not see them. `sums` are
    gradients of whole parameters, whose memory the gradients of parts later reuse (see executor.gradient_memory).
    `compress` is the compression of gradients between nodes, or everywhere if `near` is empty.
    """

    def __init__(
        self,
        comm: Comm,
        shards: Mapping[str, Shard],
        held: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        sums: Mapping[str, Tensor] | None = None,
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
        self._kept: dict[str, Tensor] = {}  # whole parameters, up to date after the wait for their unit's gather
        self._sums: dict[str, Tensor] = {}  # gradients of whole parameters, until `scatter_sums`
        self._taken_over = sums or {}
        self._left: frozenset[str] = frozenset()
        self.compressed = dict(self._compressing()) if compress else {}

    def _compressing(self) -> Iterator[tuple[str, Scattered]]:
        for name, gradient in self._gradients.items():
            levels = Levels.of(self._comm, self._shards[name].gather, self._near)
            if levels.far.size > 1:
                yield name, Scattered(levels.far.size, gradient.numel())

    def unit(self, kind: Any, *names: str) -> Unit:
        """A unit of parameters that are whole only between `gather` and `free`."""
        return Unit(self, kind, names)

    def keep(self, kind: Any, *names: str) -> Unit:
        """A unit of parameters that stay whole. In each step, the first unit with a parameter gathers it."""
        new = tuple(name for name in names if name not in self._kept)
        for name in new:
            x, dtype = self._held[name], self._shards[name].read_dtype
            make = partial(x.new_empty, dtype=dtype)
            self._kept[name] = self._allocate_whole(name, make) if self._shards[name].gather else x.to(dtype)
        return Kept(self, kind, names, tuple(name for name in new if self._shards[name].gather))

    def gather(self, names: Sequence[str], *, kept: bool = False) -> Pending[list[Tensor]]:
        """Start to gather parameters in the dtype that calls read; with `kept`, into their permanent tensors."""
        into = self._kept if kept else {}
        whole = {name: self._held[name].to(self._shards[name].read_dtype) for name in names}
        going = []
        direct: list[Pending[None]] = []
        for levels, together in self._joint_groups({name: whole[name].dtype for name in names}):
            if (axis := self._direct(levels, together)) is not None:
                parts = {name: whole[name] for name in together}
                rooms = []
                for name, x in parts.items():
                    shape = (levels.size * len(x), *x.shape[1:])
                    rooms.append(_room(into[name], shape) if name in into else x.new_empty(shape))
                    whole[name] = rooms[-1][: self._seams[name].length]
                direct.append(axis.start_all_gather_many(list(parts.values()), rooms))
                continue
            shapes = [whole[name].shape for name in together]
            flat = _joined([whole.pop(name).reshape(-1) for name in together])
            going.append((levels, together, shapes, levels.start_all_gather(flat)))
            del flat

        def finish() -> list[Tensor]:
            while direct:
                direct.pop(0).wait()
            while going:
                levels, together, shapes, rows = going.pop(0)
                columns = rows.wait().split([shape.numel() for shape in shapes], dim=2)
                for name, shape, column in zip(together, shapes, columns, strict=True):
                    dim, outer, length = seam = self._seams[name]
                    size = [outer * length if at == dim else n for at, n in enumerate(shape)]
                    parts = column.view(levels.near.size, levels.far.size, *shape)
                    without_spare = seam.rows or size[dim] == levels.size * shape[dim]
                    if name not in into and len(together) == 1 and not levels.both and without_spare:
                        whole[name] = join(parts.flatten(0, 1), dim, outer)[: size[0]]
                        continue
                    whole[name] = into[name] if name in into else column.new_empty(size)
                    levels.place(parts, whole[name], dim, outer)
            return [whole[name] for name in names]

        def advance() -> None:
            for _, _, _, rows in going:
                rows.advance()

        return Pending(finish, advance)

    def scatter(self, gradients: Mapping[str, Tensor]) -> Pending[None]:
        """Start to reduce-scatter gradients of whole parameters, and to add the results to the ranks' own parts.

        Gradients of parameters that ranks hold whole are added at once.
        """
        for name in gradients:
            if not self._shards[name].gather:
                self._gradients[name].add_(gradients[name])
        going = self._scatter(gradients)

        def finish() -> None:
            while going:
                self._add(going.pop(0).wait())

        return Pending(finish, partial(_advance, going))

    def _scatter(self, gradients: Mapping[str, Tensor]) -> list[Pending[dict[str, Tensor]]]:
        """Start to reduce-scatter gradients of whole parameters; the results are the sums of this rank's parts by
        name.
        """
        going: list[Pending[dict[str, Tensor]]] = []
        dtypes = {name: self._gradients[name].dtype for name in gradients}
        for levels, together in self._joint_groups(dtypes, apart=bool(self._compress)):
            dtype = self._wire or self._gradients[together[0]].dtype
            wide = {name: self._with_spare(name, gradients[name], levels) for name in together}
            if not self.compressed and (axis := self._direct(levels, together)) is not None:
                scattered = axis.start_reduce_scatter_many([x.to(dtype) for x in wide.values()])
                going.append(scattered.then(partial(_by_name, together)))
                continue
            rows = [levels.split(x, self._seams[name].dim, self._seams[name].outer) for name, x in wide.items()]
            del wide
            sizes = [row.shape[2] for row in rows]
            flat = _joined(rows, dtype)
            del rows
            across = partial(self._scatter_between_nodes, levels.far, together) if self.compressed else None
            going.append(levels.start_reduce_scatter(flat, across).then(partial(_cut, together, sizes)))
        return going

    def _scatter_between_nodes(self, nodes: Axis, names: Sequence[str], x: Tensor) -> Pending[Tensor]:
        """Scatter between nodes, compressed."""
        return Scattered.start(self._compress, nodes, [self.compressed[name] for name in names], x, self._comm.scale)

    def _add(self, parts: Mapping[str, Tensor]) -> None:
        for name, part in parts.items():
            self._gradients[name].add_(part.view(self._gradients[name].shape))

    def _direct(self, levels: Levels, names: Sequence[str]) -> Axis | None:
        """The axis over which these tensors can travel without copies, because ranks hold consecutive rows; else
        None.
        """
        return levels.direct if all(self._seams[name].rows for name in names) else None

    def _with_spare(self, name: str, whole: Tensor, levels: Levels) -> Tensor:
        """The tensor padded with zeros for the spare elements of parts; itself if it is padded already or needs no
        padding.
        """
        dim, outer, length = self._seams[name]
        size = levels.size * self._held[name].shape[dim]
        if whole.shape[dim] == size:
            return whole
        return extended(whole.unflatten(dim, (outer, length)), dim + 1, size // outer).flatten(dim, dim + 1)

    def cast(self) -> dict[str, Tensor]:
        """Low-precision copies of trainable parameters that ranks hold whole; the optimizer refreshes them."""
        return {
            name: x
            for name, x in self._kept.items()
            if x is not self._held[name] and name in self._gradients and not self._shards[name].gather
        }

    def leave(self, names: Collection[str]) -> None:
        """Exclude these copies from `refresh`, because the optimizer's update itself writes them."""
        self._left = frozenset(names)

    def refresh(self) -> None:
        """After the optimizer's update: refresh the low-precision copies of whole parameters."""
        for name, x in self._kept.items():
            if not self._shards[name].gather and name not in self._left and x is not self._held[name]:
                x.copy_(self._held[name])

    def sums(self, *names: str) -> list[Tensor | None]:
        """Accumulated gradients of whole parameters, which `scatter_sums` scatters and clears."""
        new = [name for name in names if name not in self._sums and name in self._gradients]
        self._sums.update((name, self._whole_gradient(name)) for name in new)
        return [self._sums.get(name) for name in names]

    def scatter_sums(self, *names: str) -> Pending[None]:
        """After a step's last microbatch: start to scatter the sums; they are cleared when the scatter ends.

        The sums of parts may then reuse the memory.
        """
        going = self._scatter({name: self._summed(name) for name in names})

        def finish() -> None:
            parts = [each.wait() for each in going]
            going.clear()
            clear(self._sums[name] for name in names)
            clear(self._gradients[name] for name in names if name in self._taken_over)
            while parts:
                self._add(parts.pop(0))

        return Pending(finish, partial(_advance, going))

    def _summed(self, name: str) -> Tensor:
        """An accumulated gradient with its spare rows; zeros if no call of this stage has computed one."""
        self.sums(name)
        x = materialized(self._sums[name])
        if not self._shards[name].gather or not self._seams[name].rows:
            return x
        levels = Levels.of(self._comm, self._shards[name].gather, self._near)
        whole = _room(x, (levels.size * len(self._held[name]), *x.shape[1:]))
        if name in self._taken_over:
            whole[len(x) :].zero_()  # spare rows still hold gradients of parts from the last step
        return whole

    def _whole_gradient(self, name: str) -> Tensor:
        gradient = self._gradients[name]
        if not self._shards[name].gather:
            return gradient
        whole = self._taken_over[name] if name in self._taken_over else self._allocate_whole(name, gradient.new_zeros)
        return Gradient.of(whole) if isinstance(gradient, Gradient) else whole

    def _allocate_whole(self, name: str, make: Callable[[Sequence[int]], Tensor]) -> Tensor:
        """Allocate a whole tensor. Its memory includes the spare rows, which also travel."""
        ways = Levels.of(self._comm, self._shards[name].gather, self._near).size
        return without_spare(make(whole_shape(self._held[name].shape, self._seams[name], ways)), self._seams[name])

    def _joint_groups(
        self, moved: Mapping[str, torch.dtype], *, apart: bool = False
    ) -> Iterator[tuple[Levels, list[str]]]:
        """Groups of names of sharded parameters whose tensors can share a collective; with `apart`, the same axes cut
        all parameters of a group.
        """
        found: dict[tuple[tuple[str, ...], torch.dtype, frozenset[str]], list[str]] = {}
        for name, dtype in moved.items():
            shard = self._shards[name]
            if shard.gather:
                found.setdefault((shard.gather, dtype, cutting(shard.dims) if apart else frozenset()), []).append(name)
        for (axes, *_), together in found.items():
            yield Levels.of(self._comm, axes, self._near), together


class Unit:
    """The parameters of one call."""

    whole: Fields  # valid from `wait` to `free`

    def __init__(self, parts: Parts, kind: Any, names: tuple[str, ...]) -> None:
        self._parts = parts
        self._kind = kind
        self._names = names
        self._holds = 0
        self._coming: Pending[list[Tensor]] | None = None

    def gather(self) -> None:
        """Start to gather. Parameters that are already gathered or being gathered need one more `free`."""
        self._holds += 1
        if self._holds == 1:
            self._coming = self._parts.gather(self._names)

    def advance(self) -> None:
        """In a gather of two levels: wait for the level between nodes, and start the one inside the node."""
        if self._coming is not None:
            self._coming.advance()

    def wait(self) -> None:
        """Wait for the gather; afterwards `whole` has the parameters."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            self.whole = self._kind(*coming.wait())

    def free(self) -> None:
        """End a use of the parameters; their memory is freed with the last one."""
        self._holds -= 1
        if not self._holds:
            del self.whole

    def scatter(self, gradients: Fields) -> Pending[None]:
        """Start to reduce-scatter gradients of the whole parameters, and to add the sums to the ranks' own parts."""
        sums: dict[str, Any] = {}
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is not None:  # several parameters of the region may be the same
                sums[name] = sums[name] + gradient if name in sums else gradient
        return self._parts.scatter(sums)


class Kept(Unit):
    """The parameters of one call that stay whole and are gathered again in each step."""

    def __init__(self, parts: Parts, kind: Any, names: tuple[str, ...], gathered: tuple[str, ...]) -> None:
        super().__init__(parts, kind, names)
        self.whole = kind(*(parts._kept[name] for name in names))
        self._gathered = gathered

    def gather(self) -> None:
        self._coming = self._parts.gather(self._gathered, kept=True)

    def wait(self) -> None:
        if self._coming is not None:
            coming, self._coming = self._coming, None
            coming.wait()


class Nothing(Unit):
    """A unit without parameters: a placeholder in loops over calls, and if no later action gathers."""

    def __init__(self) -> None:
        pass

    def gather(self) -> None:
        pass

    def advance(self) -> None:
        pass

    def wait(self) -> None:
        pass


NOTHING = Nothing()
DONE: Pending[None] = Pending(lambda: None)


def whole_shape(part: Sequence[int], seam: Seam, ways: int) -> tuple[int, ...]:
    """The shape of a whole parameter that is cut into `ways` parts, including the parts' spare rows."""
    shape = list(part)
    shape[seam.dim] = ways * part[0] if seam.rows else seam.outer * seam.length
    return tuple(shape)


def without_spare(whole: Tensor, seam: Seam) -> Tensor:
    """The parameter without spare elements, from a tensor of its `whole_shape`."""
    return whole[: seam.length] if seam.rows else whole


def _advance(exchanges: Iterable[Pending[Any]]) -> None:
    for each in exchanges:
        each.advance()


def _by_name(names: Sequence[str], parts: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(names, parts, strict=True))


def _cut(names: Sequence[str], sizes: Sequence[int], flat: Tensor) -> dict[str, Tensor]:
    return _by_name(names, flat.split(list(sizes)))


def _room(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """The rows with the spare rows that follow them in memory."""
    return rows if len(rows) == shape[0] else rows.as_strided(shape, rows.stride())


def _joined(rows: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """The rows joined in one contiguous tensor. Without a `dtype`, all must have the same."""
    if len(rows) == 1:
        return rows[0].contiguous().to(dtype or rows[0].dtype)
    sizes = [row.shape[-1] for row in rows]
    joined = rows[0].new_empty((*rows[0].shape[:-1], sum(sizes)), dtype=dtype)
    for place, row in zip(joined.split(sizes, -1), rows, strict=True):
        place.copy_(row)
    return joined
