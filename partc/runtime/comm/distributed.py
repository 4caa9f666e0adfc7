"""Communicators over torch.distributed: NCCL between GPUs, gloo between CPUs.

Groups are built directly from the rank's place, each under its own prefix of the store. A rank only connects to ranks
with which it communicates, so start-up time does not grow with the mesh. (`new_group` numbers groups by the count of
earlier ones, which differs between pipeline stages.)
"""

from __future__ import annotations

import copy
import datetime
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..clock import Clock
from ..device.sending import finish
from ..errors import PeerLost
from ..plan import DIRECT
from ..torch_private import (
    all_gather_base,
    all_gather_many,
    all_reduce,
    all_to_all_base,
    nccl_settings,
    process_group,
    reduce_scatter_base,
    reduce_scatter_many,
    send_and_receive,
)
from .comm import Axis, Comm, Link, Pending, ReduceOp, axes_and_groups

# Multiprocessors for a link's kernels: receives are posted ahead, and occupy them during computation.
LINK_BLOCKS = 4
_OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class NcclAxis(Axis):
    """A group of GPUs over a process group.

    Started collectives run on their own stream. Collectives that are waited for at once run on the caller's stream,
    without events.
    """

    moves_many = True

    def __init__(self, group: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.process_group = group

    @property
    def at_once(self) -> NcclAxis:
        axis = copy.copy(self)
        axis.overlaps = False
        return axis

    def connect(self, device: torch.device, *, link: bool) -> None:
        """Run a first operation, because NCCL connects in it. Later, this could wait for a peer whose GPU is occupied
        by operations that wait for this rank.
        """
        x = torch.zeros(1, device=device)
        if not link:
            self.raw_all_reduce(x, "sum").wait()
        else:
            group = self.process_group
            with _peers():
                _arriving(group.recv([x], 0, 0) if self.rank else group.send([x], 1, 0), x).wait()
        finish(device)

    def disconnect(self) -> None:
        """Shut down after all work is done, on all ranks; otherwise the interpreter's exit would abort the group."""
        with _peers():
            self.process_group.shutdown()
        self.process_group = None

    def abort(self) -> None:
        """End kernels that wait for lost ranks."""
        if self.process_group is not None:
            self.process_group.abort()

    def raw_all_reduce(self, x: Tensor, op: ReduceOp) -> Pending[Tensor]:
        with _peers():
            return _arriving(all_reduce(self.process_group, x, _OPS[op], overlaps=self.overlaps), x)

    def raw_all_gather(self, x: Tensor) -> Pending[Tensor]:
        whole = x.new_empty((self.size, *x.shape))
        with _peers():
            going = all_gather_base(self.process_group, whole.view(-1), x.view(-1), overlaps=self.overlaps)
            return _arriving(going, whole, x)

    def raw_reduce_scatter(self, x: Tensor) -> Pending[Tensor]:
        part = x.new_empty(x.shape[1:])
        with _peers():
            going = reduce_scatter_base(self.process_group, part.view(-1), x.view(-1), overlaps=self.overlaps)
            return _arriving(going, part, x)

    def raw_all_gather_many(self, parts: Sequence[Tensor], wholes: Sequence[Tensor]) -> Pending[None]:
        with _peers():
            going = all_gather_many(self.process_group, wholes, parts, overlaps=self.overlaps)
            return _arriving_all(going, wholes, parts)

    def raw_reduce_scatter_many(self, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> Pending[None]:
        with _peers():
            going = reduce_scatter_many(self.process_group, parts, wholes, overlaps=self.overlaps)
            return _arriving_all(going, parts, wholes)

    def raw_all_to_all(self, x: Tensor) -> Pending[Tensor]:
        result = torch.empty_like(x)
        with _peers():
            going = all_to_all_base(self.process_group, _bytes(result), _bytes(x), overlaps=self.overlaps)
            return _arriving(going, result, x)

    def raw_exchange_rows(self, x: Tensor, going: list[int], coming: list[int]) -> Pending[Tensor]:
        result = x.new_empty((sum(coming), *x.shape[1:]))
        with _peers():
            work = all_to_all_base(
                self.process_group, _bytes(result), _bytes(x), overlaps=self.overlaps, received=coming, sent=going
            )
            return _arriving(work, result, x)

    def raw_shift(self, x: Tensor) -> Pending[Tensor]:
        result = torch.empty_like(x)
        target, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        with _peers():
            going = send_and_receive(self.process_group, _bytes(x), target, _bytes(result), source)
            return _arriving(going, result, x)


class GlooAxis(NcclAxis):
    """A group of CPUs whose ranks send directly to each other: gloo's own gather takes up to five times as long."""

    moves_many = False

    @property
    def at_once(self) -> GlooAxis:
        return self

    def connect(self, device: torch.device, *, link: bool) -> None:
        """Does nothing: a gloo group connects when it is created."""

    def disconnect(self) -> None:
        self.process_group = None  # its threads end here, not during the interpreter's exit

    def abort(self) -> None:
        """Does nothing: gloo leaves nothing behind when its process ends."""

    def raw_all_reduce(self, x: Tensor, op: ReduceOp) -> Pending[Tensor]:
        if x.numel() * x.element_size() * (self.size - 1) > DIRECT:
            return super().raw_all_reduce(x, op)

        def combined(parts: Tensor) -> Tensor:
            return torch.sum(parts, 0, out=x) if op == "sum" else torch.amax(parts, 0, out=x)

        return self.raw_all_gather(x).then(combined)

    def raw_all_gather(self, x: Tensor) -> Pending[Tensor]:
        whole = x.new_empty((self.size, *x.shape))
        mine = whole[self.rank].copy_(x)  # also the tensors that are sent, so that no other reference is needed
        return _arriving(self._exchange(lambda target: mine, lambda source: whole[source]), whole)

    def _exchange(self, to: Callable[[int], Tensor], into: Callable[[int], Tensor]) -> list[Any]:
        """Send each other rank its tensor, and receive one from each.

        Receives are posted before sends: a peer sends when it learns of the receive, and this notice must not queue
        behind a tensor. Otherwise the two directions of a slow link would take turns, as in gloo's all-to-all.
        """
        group, work = self.process_group, []
        distances = range(1, self.size)
        with _peers():
            for source in ((self.rank - distance) % self.size for distance in distances):
                x = into(source)
                if x.numel():
                    work.append(group.recv([_bytes(x)], source, 0))
            for target in ((self.rank + distance) % self.size for distance in distances):
                x = to(target)
                if x.numel():
                    work.append(group.send([_bytes(x)], target, 0))
        return work

    def raw_all_to_all(self, x: Tensor) -> Pending[Tensor]:
        result = torch.empty_like(x)
        result[self.rank] = x[self.rank]
        return _arriving(self._exchange(x.__getitem__, result.__getitem__), result, x)

    def raw_exchange_rows(self, x: Tensor, going: list[int], coming: list[int]) -> Pending[Tensor]:
        result = x.new_empty((sum(coming), *x.shape[1:]))
        sent, received = x.split(going), result.split(coming)
        received[self.rank].copy_(sent[self.rank])
        return _arriving(self._exchange(sent.__getitem__, received.__getitem__), result, x)

    def raw_reduce_scatter(self, x: Tensor) -> Pending[Tensor]:
        """Each rank receives only its own rows from the others."""
        received = x.new_empty((self.size - 1, *x.shape[1:]))
        work = self._exchange(lambda target: x[target], lambda source: received[(self.rank - source) % self.size - 1])
        mine = [x[self.rank]]

        def summed(rows: Tensor) -> Tensor:
            """The sum in the order of ranks, in at least fp32."""
            wide = torch.promote_types(rows.dtype, torch.float32)
            places = [(self.rank - source) % self.size for source in range(self.size)]
            return self._total((rows[place - 1] if place else mine.pop()).to(wide) for place in places).to(rows.dtype)

        return _arriving(work, received, x).then(summed)

    def _total(self, rows: Iterator[Tensor]) -> Tensor:
        """The sum of two or more rows, in order; only few of them are in memory at a time."""
        total = next(rows) + next(rows)
        for row in rows:
            total += row
        return total


def _arriving_all(work: Any, results: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending[None]:
    """The pending results of several tensors that one work object moves."""
    going = [_arriving(work, results[0])]
    held = [results, sources]

    def finish() -> None:
        going.pop().wait()
        held.clear()

    return Pending(finish)


def _arriving(work: Any, x: Tensor, source: Tensor | None = None) -> Pending[Tensor]:
    """The pending result of one or several work objects; `source` is kept alive until they are done.

    None stands for work on the caller's stream, which needs no wait.
    """
    parts = list(work) if isinstance(work, list) else [] if work is None else [work]
    held = [source]

    def finish() -> Tensor:
        with _peers():
            while parts:  # a work object keeps its tensors alive as long as it exists
                parts.pop().wait()
        held.clear()
        return x

    return Pending(finish)


class DistributedComm(Comm):
    """Axes over process groups, and a two-rank communicator for each link."""

    def __init__(
        self,
        *,
        rank: int,
        coordinate: Mapping[str, int],
        groups: Mapping[str, tuple[int, ...]],
        links: Mapping[Link, int],
        stages: Sequence[int],
        world_size: int,
        store: Store,
        device: torch.device,
        timeout: datetime.timedelta,
        clock: Clock | None = None,
    ) -> None:
        self.device = device
        self._rank = rank
        self._store = store
        self._world_size = world_size
        self._barriers = 0
        self._posted: dict[tuple[Link, int], list[tuple[Any, Tensor]]] = {}  # (link, microbatch) -> posted sends
        wanted = [(ranks, name) for name, ranks in groups.items()]
        for (source, target), peer in links.items():
            wanted.append(((rank, peer) if source in stages else (peer, rank), f"link {source} {target}"))
        # All ranks connect their groups in one order, by the members of each group. All members of the first
        # unconnected group are then waiting for it, so connecting always terminates.
        axis = NcclAxis if device.type == "cuda" else GlooAxis
        if device.type == "cuda":
            nccl_settings(os.environ, pipeline=bool(links))
        made: dict[str, NcclAxis] = {}
        for ranks, name in sorted(wanted):
            prefix = PrefixStore(f"{name}:{'-'.join(map(str, ranks))}", store)
            place, link = ranks.index(rank), name not in groups
            with _peers():
                group = process_group(prefix, place, len(ranks), device, timeout, most_blocks=LINK_BLOCKS * link)
            made[name] = axis(group, place, len(ranks))
            made[name].connect(device, link=link)
        self._made = tuple(made.values())
        self._links = {link: made[f"link {link[0]} {link[1]}"] for link in links}
        super().__init__(*axes_and_groups(coordinate, {name: made[name] for name in groups}), clock)

    def _send(self, x: Tensor, link: Link) -> None:
        x = x.contiguous()
        # Keep the tensor until the transfer ends: nothing else may hold it by then.
        with _peers():
            work = self._links[link].process_group.send([_bytes(x)], 1, 0)
        self._posted.setdefault((link, self.mb.rank), []).append((work, x))

    def _recv(self, shape: Sequence[int], dtype: torch.dtype, link: Link) -> Pending[Tensor]:
        x = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        with _peers():
            return _arriving(self._links[link].process_group.recv([_bytes(x)], 0, 0), x)

    def release_sent(self, link: Link, microbatch: int) -> None:
        with _peers():
            for work, _ in self._posted.pop((link, microbatch), ()):
                work.wait()

    def _drain(self) -> None:
        for link, microbatch in tuple(self._posted):
            self.release_sent(link, microbatch)

    def barrier(self) -> None:
        self._barriers += 1
        with _peers():
            meet_ranks(self._store, f"barrier/{self._barriers}", self._world_size)

    def any(self, flag: bool) -> bool:
        self._barriers += 1
        place = f"any/{self._barriers}"
        with _peers():
            if flag:
                self._store.set(f"{place}/true", "")
            meet_ranks(self._store, place, self._world_size)
            found: bool = self._store.check([f"{place}/true"])
            if self._rank == 0:  # all ranks have arrived, so all have read the earlier entries
                self._store.delete_key(f"any/{self._barriers - 1}")
                self._store.delete_key(f"any/{self._barriers - 1}/all")
        return found

    def gather_texts(self, text: str) -> list[str]:
        self._barriers += 1
        with _peers():
            self._store.set(f"said/{self._barriers}/{self._rank}", text)
            meet_ranks(self._store, f"said/{self._barriers}", self._world_size)
            return [self._store.get(f"said/{self._barriers}/{rank}").decode() for rank in range(self._world_size)]

    def disconnect(self) -> None:
        """Destroy all groups, in the order of their creation; no work may be in progress."""
        for axis in self._made:
            axis.disconnect()

    def abort(self) -> None:
        """Destroy all groups, even with work in progress. This may take as long as a rank waits for others."""
        for axis in self._made:
            axis.abort()

    def close(self) -> None:
        """Disconnect. Rank 0 may host the store, so it leaves last."""
        if self._world_size > 1:
            with _peers():
                meet_ranks(self._store, "left", self._world_size, wait=self._rank == 0)


def meet_ranks(store: Store, place: str, count: int, *, wait: bool = True) -> None:
    """Count this rank at a meeting place, and wait until `count` ranks have arrived."""
    if store.add(place, 1) == count:
        store.set(f"{place}/all", "")
    if wait:
        store.wait([f"{place}/all"])


@contextmanager
def _peers() -> Iterator[None]:
    """A context whose failures are attributed to another rank."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error)) from error


def _bytes(x: Tensor) -> Tensor:
    """The same memory in a dtype that every backend supports (gloo has no bool)."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x
