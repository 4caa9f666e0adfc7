"""Collectives along mesh axes and transfers between stages: one interface for all backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from ..clock import Clock, Kind
from ..device.random_offsets import Words
from ..dims import parse_dims
from ..loads import Loads
from ..positions import Positions, Stretches
from ..random import Draw
from ..torch_private import storage_key

ReduceOp = Literal["sum", "max"]
T = TypeVar("T")
S = TypeVar("S")


class Pending(Generic[T]):
    """A pending result, mostly a tensor. Its operands must not be written to before it is waited for.

    It may have two stages; the second one reads the result of the first.
    """

    __slots__ = ("_advance", "_finish")

    def __init__(self, finish: Callable[[], T], advance: Callable[[], None] = lambda: None) -> None:
        self._finish = finish
        self._advance = advance

    def wait(self) -> T:
        """Wait for the result and return it; called once, after `advance` if there are two stages."""
        return self._finish()

    def advance(self) -> None:
        """Wait for the first of two stages, and start the second."""
        self._advance()

    def then(self, change: Callable[[T], S]) -> Pending[S]:
        """The pending result of a function applied on arrival."""
        return Pending(lambda: change(self._finish()), self._advance)


def timed(clock: Clock, kind: Kind, name: str, over: str, size: int, start: Callable[[], Pending[T]]) -> Pending[T]:
    """The same pending result, whose start and waiting time are reported to the clock."""
    posted = clock.mark()
    going = start()

    def finish() -> T:
        begun = clock.begin(name, over)
        x = going.wait()
        clock.end(begun, kind, name, over, size, posted)
        return x

    return Pending(finish)


def timed_at_once(
    clock: Clock, kind: Kind, name: str, over: str, size: int, start: Callable[[], Pending[Tensor]]
) -> Tensor:
    """Start and wait; all of it is reported to the clock as waiting time."""
    begun = clock.begin(name, over)
    x = start().wait()
    clock.end(begun, kind, name, over, size)
    return x


def completed(x: Tensor) -> Pending[Tensor]:
    """A pending tensor that is already complete."""
    return Pending(lambda: x)


class Axis:
    """This rank's view of a group of ranks: its index (`rank`) among `size`, and their collectives.

    In every operation `dim` is viewed as [outer, rest] and only `rest` is gathered, scattered or cut, so that a strided
    shard (such as a fused QKV weight) needs no reordering. A group of one does nothing. Started collectives run while
    the rank computes; all ranks of a group start them in the same order. Subclasses move the bytes: they implement the
    `raw_` methods, on contiguous tensors.
    """

    name = ""  # the axes of the group
    moves_many = False  # whether several tensors can travel in one collective without being copied into one
    clock: Clock | None = None  # records every collective
    overlaps = True  # whether collectives overlap with the rank's own work

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.loads = Loads(Clock())  # records rows that are received for experts

    @property
    def at_once(self) -> Axis:
        """The group for collectives that are waited for immediately, at lower cost if the backend supports that."""
        return self

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        """The sum (or maximum) over the group, in a new tensor."""
        return self.at_once.start_all_reduce(x, op).wait()

    def all_reduce_(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        """The same into `x` itself, for a tensor that nothing else reads."""
        return self.at_once.start_all_reduce_(x, op).wait()

    def all_gather(self, x: Tensor, *, dim: int, outer: int = 1) -> Tensor:
        """The concatenation of all ranks' shards along `rest`."""
        return self.at_once.start_all_gather(x, dim=dim, outer=outer).wait()

    def reduce_scatter(self, x: Tensor, *, dim: int, outer: int = 1) -> Tensor:
        """This rank's part, along `rest`, of the sum over the group."""
        return self.at_once.start_reduce_scatter(x, dim=dim, outer=outer).wait()

    def all_to_all(
        self, x: Tensor, *, split_dim: int, split_outer: int = 1, concat_dim: int, concat_outer: int = 1
    ) -> Tensor:
        """Cut along one dimension and join along another: a tensor sharded along the latter becomes sharded along the
        former.
        """
        return self.at_once.start_all_to_all(
            x, split_dim=split_dim, split_outer=split_outer, concat_dim=concat_dim, concat_outer=concat_outer
        ).wait()

    def start_shift(self, x: Tensor) -> Pending[Tensor]:
        """Send `x` to the next rank of a ring, and receive the previous rank's tensor."""
        if self.size == 1:
            return completed(x)
        return self.start("shift", self.raw_shift, x.contiguous())

    def start_all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Pending[Tensor]:
        if self.size == 1:
            return completed(x)
        return self.start("all_reduce", self.raw_all_reduce, x.clone(memory_format=torch.contiguous_format), op)

    def start_all_reduce_(self, x: Tensor, op: ReduceOp = "sum") -> Pending[Tensor]:
        """Start a sum into `x`, which must not be read before the wait."""
        if self.size == 1:
            return completed(x)
        if not x.is_contiguous():
            return self.start("all_reduce", self.raw_all_reduce, x.contiguous(), op).then(x.copy_)
        return self.start("all_reduce", self.raw_all_reduce, x, op)

    def start_all_gather(self, x: Tensor, *, dim: int, outer: int = 1) -> Pending[Tensor]:
        if self.size == 1:
            return completed(x)
        going = self.start("all_gather", self.raw_all_gather, x.contiguous())
        return going.then(lambda parts: join(parts, dim, outer))

    def start_reduce_scatter(self, x: Tensor, *, dim: int, outer: int = 1) -> Pending[Tensor]:
        if self.size == 1:
            return completed(x)
        return self.start("reduce_scatter", self.raw_reduce_scatter, split(x, self.size, dim, outer).contiguous())

    def start_all_gather_many(self, parts: Sequence[Tensor], wholes: Sequence[Tensor]) -> Pending[None]:
        """Start to gather each part into its contiguous whole, ranks along dim 0; for axes with `moves_many`."""
        start = partial(self.raw_all_gather_many, [x.contiguous() for x in parts], wholes)
        return self._start_many("all_gather", start, parts)

    def start_reduce_scatter_many(self, wholes: Sequence[Tensor]) -> Pending[list[Tensor]]:
        """Start to sum each tensor and return this rank's part along dim 0; for axes with `moves_many`."""
        parts = [x.new_empty((x.shape[0] // self.size, *x.shape[1:])) for x in wholes]
        start = partial(self.raw_reduce_scatter_many, [x.contiguous() for x in wholes], parts)
        return self._start_many("reduce_scatter", start, wholes).then(lambda done: parts)

    def _start_many(self, name: str, start: Callable[[], Pending[None]], moved: Sequence[Tensor]) -> Pending[None]:
        size = sum(x.nbytes for x in moved)
        return start() if self.clock is None else timed(self.clock, "collective", name, self.name, size, start)

    def start_all_to_all(
        self, x: Tensor, *, split_dim: int, split_outer: int = 1, concat_dim: int, concat_outer: int = 1
    ) -> Pending[Tensor]:
        if self.size == 1:
            return completed(x)
        parts = split(x, self.size, split_dim, split_outer).contiguous()
        going = self.start("all_to_all", self.raw_all_to_all, parts)
        return going.then(lambda parts: join(parts, concat_dim, concat_outer))

    def start_exchange(self, x: Tensor, sent: Tensor, received: Tensor, *, rows: int) -> Pending[Tensor]:
        """Exchange rows with every rank. This rank receives `rows` rows in total.

        `sent` and `received` hold their numbers, divided equally among the ranks in order.
        """
        if self.size == 1:
            return completed(x)
        going, coming = (counts.view(self.size, -1).sum(1).tolist() for counts in (sent, received))
        if (sum(going), sum(coming)) != (x.shape[0], rows):
            raise RuntimeError(
                f"{x.shape[0]} rows are to travel over {self.name} and {rows} to come, and {sum(going)} and "
                f"{sum(coming)} were counted"
            )
        return self.start("exchange", partial(self.raw_exchange_rows, going=going, coming=coming), x.contiguous())

    def reduce_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Sum each gradient over the group, in place. Neighbours in memory travel together.

        The ranks must belong to one stage: their gradients have the same memory layout, so they join the same
        neighbours.
        """
        if self.size > 1:
            for run in runs(gradients):
                self.at_once.start_all_reduce_(run).wait()

    def take(self, x: Tensor, *, dim: int, outer: int = 1) -> Tensor:
        """This rank's part along `rest`; moves nothing."""
        if self.size == 1:
            return x
        return _blocks(x, self.size, dim, outer).select(dim + 1, self.rank).flatten(dim, dim + 1)

    def put(self, x: Tensor, *, dim: int, outer: int = 1) -> Tensor:
        """A tensor of zeros with `x` as this rank's part: the transpose of `take`."""
        if self.size == 1:
            return x
        before, after, rest = x.shape[:dim], x.shape[dim + 1 :], x.shape[dim] // outer
        whole = x.new_zeros((*before, outer, self.size, rest, *after))
        whole.select(dim + 1, self.rank).copy_(x.reshape(*before, outer, rest, *after))
        return whole.view(*before, x.shape[dim] * self.size, *after)

    def start(self, name: str, raw: Callable[..., Pending[Tensor]], x: Tensor, *rest: ReduceOp) -> Pending[Tensor]:
        """Start a collective by its `raw_` method; the clock, if there is one, records it."""
        if self.clock is None:
            return raw(x, *rest)
        going = partial(raw, x, *rest)
        if self.overlaps:
            return timed(self.clock, "collective", name, self.name, x.nbytes, going)
        return completed(timed_at_once(self.clock, "collective", name, self.name, x.nbytes, going))

    def raw_all_reduce(self, x: Tensor, op: ReduceOp) -> Pending[Tensor]:
        """Reduce a contiguous tensor in place."""
        raise NotImplementedError

    def raw_all_gather(self, x: Tensor) -> Pending[Tensor]:
        """[...] -> [size, ...], by rank."""
        raise NotImplementedError

    def raw_reduce_scatter(self, x: Tensor) -> Pending[Tensor]:
        """[size, ...] -> [...]: this rank's row of the sum."""
        raise NotImplementedError

    def raw_all_gather_many(self, parts: Sequence[Tensor], wholes: Sequence[Tensor]) -> Pending[None]:
        """Each [...] -> [size * ..., ...], by rank, into existing contiguous tensors."""
        raise NotImplementedError

    def raw_reduce_scatter_many(self, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> Pending[None]:
        """Each [size * ..., ...] -> [...]: this rank's rows of the sum, into existing contiguous tensors."""
        raise NotImplementedError

    def raw_exchange_rows(self, x: Tensor, going: list[int], coming: list[int]) -> Pending[Tensor]:
        """The first `going[0]` rows to rank 0, and so on; the result has `coming[0]` rows from rank 0 first."""
        raise NotImplementedError

    def raw_all_to_all(self, x: Tensor) -> Pending[Tensor]:
        """[size, ...] -> [size, ...]: row i goes to rank i; row i of the result came from rank i."""
        raise NotImplementedError

    def raw_shift(self, x: Tensor) -> Pending[Tensor]:
        """[...] -> [...]: the tensor of the rank before this one."""
        raise NotImplementedError


Link = tuple[int, int]  # from stage, to stage


class Comm:
    """The communication of one rank: an Axis per mesh axis (`comm.tp`), groups over several axes, links of stages.

    A link goes from one stage to another and keeps the order of its tensors.
    """

    device = torch.device("cpu")  # where this rank computes

    def __init__(self, axes: Mapping[str, Axis], groups: Mapping[str, Axis], clock: Clock | None = None) -> None:
        self._groups = dict(groups)
        self.clock = Clock() if clock is None else clock
        self.loads = Loads(self.clock)
        for name, axis in groups.items():
            axis.name, axis.clock, axis.loads = name, self.clock, self.loads
        self.mb = Axis()  # microbatches: an axis in time, on which only `take` and `put` make sense
        self.draws = 0  # the number of random operations per microbatch, if microbatches draw separately
        self.seed = 0
        self.step = 0
        self.scale = 1.0  # the scale of the loss, and so of every gradient; set by `scales`
        for name, axis in axes.items():
            setattr(self, name, axis)

    def __getattr__(self, name: str) -> Axis:
        raise AttributeError(f"the mesh has no axis {name!r}")

    @cached_property
    def scale_here(self) -> Tensor:
        """The loss scale on this rank's device, f64[]."""
        return torch.full((), self.scale, dtype=torch.float64, device=self.device)

    def scales(self, scale: float) -> None:
        """Set the loss scale."""
        self.scale = scale
        self.scale_here.fill_(scale)

    def times_scale(self, x: Tensor) -> Tensor:
        """The loss scale times a gradient that the model computes itself."""
        return x * self.scale_here.to(x.dtype)

    @cached_property
    def words(self) -> Words:
        """The starts of this rank's random numbers."""
        return Words(self.device)

    def expect(self, draws: int, times: int) -> None:
        """Announce `draws` random operations for each of `times` microbatches: forward and backward."""
        self.draws = draws if times > 1 else 0
        self.words.reserve(2 * draws * times)

    def begins(self, seed: int, batch: int) -> None:
        """Use the random numbers of this batch from now on."""
        self.seed, self.step = seed, batch
        self.words.write(seed, batch)

    def group(self, axes: Sequence[str]) -> Axis:
        """The ranks that differ from this one on these axes only."""
        if len(axes) > 1:
            return self._groups[",".join(axes)]
        axis = getattr(self, axes[0])
        assert isinstance(axis, Axis)
        return axis

    def pipeline(self, ranks: Sequence[int]) -> Axis:
        """The group of some ranks of this one's pipeline, by their coordinates on it."""
        return self._groups["pp " + ",".join(map(str, ranks))]

    def draw(self, number: int, layout: str) -> Draw:
        """The random numbers of a step for operation `number` and a tensor of this layout (`16@dp,mb, 64@tp`).

        `2 · 16@cp zigzag 4 of 31` is a dimension in zigzag order, of which 31 positions are the model's.
        """
        places = []
        for text in layout.split(", ") if layout else ():
            order = Positions.parse(text).order
            if order.true:
                runs = [torch.arange(run.start, run.stop, device=self.device) for run in self.positions(text)]
                places.append((torch.cat(runs), order.true))
                continue
            (dim,) = parse_dims(f"[{text}]")
            index = torch.zeros(1, dtype=torch.int64, device=self.device)
            for size, axes in dim:
                ways = place = 0
                for name in axes:
                    axis = self.group((name,))
                    ways, place = (ways or 1) * axis.size, place * axis.size + axis.rank
                here = size // (ways or 1)
                index = (
                    index[:, None] * size + torch.arange(place * here, (place + 1) * here, device=self.device)
                ).flatten()
            places.append((index, math.prod(size for size, _ in dim)))
        start = self._word(number, -1)
        return Draw(start, tuple(places), tuple(size for _, size in places), self.device)

    def positions(self, dim: str) -> Stretches:
        """The positions that this rank holds of a dimension `2 · 16@cp`."""
        found = Positions.parse(dim)
        return found.of_rank(self._places(found))

    def positions_along(self, axis: str, dim: str) -> tuple[Stretches, ...]:
        """The positions that each rank of an axis holds."""
        found, size = Positions.parse(dim), self.group((axis,)).size
        places = self._places(found)
        return tuple(found.of_rank({**places, axis: (rank, size)}) for rank in range(size))

    def _places(self, dim: Positions) -> dict[str, tuple[int, int]]:
        axes = {name: self.group((name,)) for name in dim.axes}
        return {name: (axis.rank, axis.size) for name, axis in axes.items()}

    def counter(self, number: int, layout: str) -> Tensor:
        """The generator's unmixed word for this rank's first element, for kernels that draw random numbers
        themselves.
        """
        first = 0
        for size, axes in (factor for dim in parse_dims(f"[{layout}]") for factor in dim):
            ways, place = 1, 0
            for name in axes:
                axis = self.group((name,))
                ways, place = ways * axis.size, place * axis.size + axis.rank
            first = first * size + place * (size // ways)
        return self._word(number, first)

    def _word(self, number: int, index: int) -> Tensor:
        return self.words.at(self.seed, self.step, number + self.mb.rank * self.draws, index)

    def send(self, x: Tensor, link: Link) -> None:
        """Post `x` on a link that starts here; does not wait."""
        over = f"link {link[0]} {link[1]}"
        begun = self.clock.begin("send", over)
        self._send(x, link)
        self.clock.end(begun, "send", "send", over, x.nbytes)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, link: Link) -> Pending[Tensor]:
        """Post a receive for the next tensor on a link that ends here."""
        size = math.prod(shape) * dtype.itemsize
        start = partial(self._recv, shape, dtype, link)
        return timed(self.clock, "recv", "recv", f"link {link[0]} {link[1]}", size, start)

    def release_sent(self, link: Link, microbatch: int) -> None:
        """Release the tensor that was sent over a link for a microbatch, after the other end has confirmed it."""

    def drain(self) -> None:
        """Wait until everything posted has been sent; called once, at a step's end."""
        begun = self.clock.begin("drain", "all links")
        self._drain()
        self.clock.end(begun, "drain", "drain", "all links", 0)

    def _send(self, x: Tensor, link: Link) -> None:
        raise NotImplementedError

    def _recv(self, shape: Sequence[int], dtype: torch.dtype, link: Link) -> Pending[Tensor]:
        raise NotImplementedError

    def _drain(self) -> None:
        pass

    def barrier(self) -> None:
        """Wait for every rank of the mesh."""

    def any(self, flag: bool) -> bool:
        """A barrier of the whole mesh that returns whether the flag is true on any rank."""
        raise NotImplementedError

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks of the mesh, by rank; slow."""
        raise NotImplementedError

    def close(self) -> None:
        """Close all connections."""


def axes_and_groups(
    coordinate: Mapping[str, int], groups: Mapping[str, Axis]
) -> tuple[dict[str, Axis], dict[str, Axis]]:
    """The two arguments of Comm: axes of size 1 have no literal group and become no-ops."""
    return {name: groups.get(name, Axis()) for name in coordinate}, dict(groups)


def split(x: Tensor, ways: int, dim: int, outer: int) -> Tensor:
    """[..., outer·ways·rest, ...] -> [ways, ..., outer·rest, ...], a view where `outer` is 1."""
    return _blocks(x, ways, dim, outer).movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def _blocks(x: Tensor, ways: int, dim: int, outer: int) -> Tensor:
    """[..., outer·ways·rest, ...] -> [..., outer, ways, rest, ...]. Raises ValueError if the size does not divide."""
    rest, spare = divmod(x.shape[dim], outer * ways)
    if spare:
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} cannot be cut in {outer} x {ways}")
    return x.reshape(*x.shape[:dim], outer, ways, rest, *x.shape[dim + 1 :])


def join(parts: Tensor, dim: int, outer: int) -> Tensor:
    """[ways, ..., outer·rest, ...] -> [..., outer·ways·rest, ...], dense; copies only where ways isn't outermost."""
    ways, *shape = parts.shape
    rest = shape[dim] // outer
    split = parts.reshape(ways, *shape[:dim], outer, rest, *shape[dim + 1 :]).movedim(0, dim + 1)
    return split.reshape(*shape[:dim], outer * ways * rest, *shape[dim + 1 :]).contiguous()


def runs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same memory in fewer, longer tensors: a tensor joins the previous one if it follows it in the same
    storage.
    """
    runs: list[Tensor] = []
    for x in tensors:
        flat = x.view(-1)
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.dtype == flat.dtype
            and storage_key(last) == storage_key(flat)
            and last.storage_offset() + last.numel() == flat.storage_offset()
        ):
            runs[-1] = last.as_strided((last.numel() + flat.numel(),), (1,), last.storage_offset())
        else:
            runs.append(flat)
    return runs
