"""All ranks in one process: one thread per rank, only one of which runs at a time, and communicators in memory.

Threads switch only where ranks wait for each other. So a run is deterministic and without contention, and a deadlock is
detected at once: all ranks wait and none can run.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .comm import Axis, Comm, Link, Pending, ReduceOp, axes_and_groups


class Deadlock(RuntimeError):
    """All ranks wait for one another."""


class _Stopped(BaseException):
    """Unwinds a rank's thread after another rank has failed."""


class World:
    """The ranks' turns, their meeting points and mailboxes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.groups: dict[tuple[str, tuple[int, ...]], _Group] = {}
        self.mailboxes: dict[tuple[int, int, Link], dict[int, Tensor]] = {}
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._ready: deque[int] = deque(range(size))
        self._waiting: dict[int, str] = {}
        self._readers: dict[int, tuple[int, Link]] = {}  # waiting rank -> (sender, link)
        self._error: BaseException | None = None
        self._failed_rank = -1

    def run(self, work: Callable[[int], None]) -> None:
        """Call `work(rank)` for every rank. The first failure stops all ranks and is raised here."""
        threads = [threading.Thread(target=self._rank, args=(rank, work), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._pass_turn()
        for thread in threads:
            thread.join()
        if self._error is not None:
            self._error.add_note(f"on virtual rank {self._failed_rank}") if hasattr(self._error, "add_note") else None
            raise self._error

    def _rank(self, rank: int, work: Callable[[int], None]) -> None:
        self._turns[rank].acquire()
        try:
            if self._error is None:
                work(rank)
        except _Stopped:
            pass
        except BaseException as error:
            self._fail(rank, error)
        self._pass_turn()

    def _fail(self, rank: int, error: BaseException) -> None:
        if self._error is None:
            self._error, self._failed_rank = error, rank

    def _pass_turn(self) -> None:
        if not self._ready and self._waiting:
            # No rank can run: after a failure the waiting ranks unwind one by one; otherwise this is a deadlock.
            if self._error is None:
                waits = "; ".join(f"rank {rank} in {what}" for rank, what in sorted(self._waiting.items()))
                self._fail(min(self._waiting), Deadlock(f"every rank waits for another: {waits}"))
            self._ready.append(min(self._waiting))
            del self._waiting[self._ready[0]]
        if self._ready:
            self._turns[self._ready.popleft()].release()

    def wait(self, rank: int, what: str) -> None:
        """Yield the turn until `wake(rank)`."""
        self._waiting[rank] = what
        self._pass_turn()
        self._turns[rank].acquire()
        if self._error is not None:
            raise _Stopped

    def wake(self, rank: int) -> None:
        if rank in self._waiting:
            del self._waiting[rank]
            self._ready.append(rank)

    def wait_for_mail(self, rank: int, sender: int, link: Link) -> None:
        self._readers[rank] = sender, link
        self.wait(rank, f"recv from rank {sender}, stage {link[0]} to {link[1]}")

    def mail_arrived(self, rank: int, sender: int, link: Link) -> None:
        if self._readers.get(rank) == (sender, link):
            del self._readers[rank]
            self.wake(rank)


@dataclass(slots=True)
class _Meeting:
    """One collective of a group: the contributions, the results, and the waiting ranks."""

    operation: str
    brought: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # rank -> (tensor, hash of its contents)
    results: dict[int, Tensor] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Group:
    """A group's collectives in progress, by number, and the number of collectives that each rank has begun."""

    meetings: dict[int, _Meeting] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    exchanges: dict[int, dict[int, list[Tensor]]] = field(default_factory=dict)  # the rows for each rank, by sender


class VirtualAxis(Axis):
    """A group of virtual ranks. After all ranks have entered a collective, the first one that waits computes
    everybody's result.

    Tensors travel together as they do between GPUs, so that virtual runs test the same code.
    """

    moves_many = True

    def __init__(self, world: World, name: str, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(ranks.index(rank), len(ranks))
        self._world, self.ranks = world, ranks
        self.name = name
        self._group = world.groups.setdefault((name, ranks), _Group())

    def meet(self, operation: str, x: Tensor, combine: Callable[[list[Tensor]], Sequence[Tensor]]) -> Pending[Tensor]:
        """Enter a collective. `combine` makes the results of all ranks, in order, of the tensors that they bring."""
        group, me = self._group, self.ranks[self.rank]
        # Ranks may contribute any number of rows.
        shape = [*x.shape] if operation != "exchange" else ["rows", *x.shape[1:]]
        of = f"{str(x.dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
        signature = f"{operation} of {of} over {self.name}"
        number = group.begun[me] = group.begun.get(me, 0) + 1
        meeting = group.meetings.setdefault(number, _Meeting(signature))
        if meeting.operation != signature:
            raise RuntimeError(f"ranks {self.ranks} disagree: {meeting.operation} meets {signature}")
        meeting.brought[me] = x, _hash(x)
        if len(meeting.brought) == self.size:
            for rank in meeting.waiting:
                self._world.wake(rank)

        def finish() -> Tensor:
            if len(meeting.brought) < self.size:
                meeting.waiting.add(me)
                self._world.wait(me, signature)
            if not meeting.results:
                del group.meetings[number]
                if any(not torch.equal(_hash(tensor), was) for tensor, was in meeting.brought.values()):
                    raise RuntimeError(f"an operand of {signature} was changed before the collective was complete")
                # In rank order, whatever the order of arrival, so that sums are equal in every run.
                results = combine([meeting.brought[rank][0] for rank in self.ranks])
                meeting.results = dict(zip(self.ranks, results, strict=True))
            return meeting.results.pop(me)

        return Pending(finish)

    def raw_all_reduce(self, x: Tensor, op: ReduceOp) -> Pending[Tensor]:
        def combine(parts: list[Tensor]) -> list[Tensor]:
            total = _reduced(parts, op)
            return [total for _ in parts]

        return self.meet(f"all_reduce {op}", x, combine).then(x.copy_)

    def raw_all_gather(self, x: Tensor) -> Pending[Tensor]:
        return self.meet("all_gather", x, lambda parts: [torch.stack(parts) for _ in parts])

    def raw_reduce_scatter(self, x: Tensor) -> Pending[Tensor]:
        return self.meet("reduce_scatter", x, lambda parts: [row.clone() for row in _reduced(parts, "sum")])

    def raw_all_gather_many(self, parts: Sequence[Tensor], wholes: Sequence[Tensor]) -> Pending[None]:
        sizes = [part.numel() for part in parts]

        def place(rows: Tensor) -> None:
            for whole, columns in zip(wholes, rows.split(sizes, 1), strict=True):
                whole.view(columns.shape).copy_(columns)

        return self.raw_all_gather(torch.cat([part.view(-1) for part in parts])).then(place)

    def raw_reduce_scatter_many(self, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> Pending[None]:
        sizes = [part.numel() for part in parts]

        def place(row: Tensor) -> None:
            for part, piece in zip(parts, row.split(sizes), strict=True):
                part.view(-1).copy_(piece)

        return self.raw_reduce_scatter(torch.cat([whole.view(self.size, -1) for whole in wholes], 1)).then(place)

    def raw_exchange_rows(self, x: Tensor, going: list[int], coming: list[int]) -> Pending[Tensor]:
        parts = [part.clone() for part in x.split(going)]
        sent = self._group.exchanges
        number = self._group.begun.get(self.ranks[self.rank], 0) + 1
        sent.setdefault(number, {})[self.rank] = parts

        def combine(_: list[Tensor]) -> list[Tensor]:
            every = sent.pop(number)
            return [torch.cat([every[source][target] for source in range(self.size)]) for target in range(self.size)]

        def counted(rows: Tensor) -> Tensor:
            if rows.shape[0] != sum(coming):
                raise RuntimeError(f"{sum(coming)} rows were to come over {self.name}, and {rows.shape[0]} came")
            return rows

        return self.meet("exchange", x, combine).then(counted)

    def raw_shift(self, x: Tensor) -> Pending[Tensor]:
        return self.meet("shift", x, lambda parts: [part.clone() for part in (parts[-1], *parts[:-1])])

    def raw_all_to_all(self, x: Tensor) -> Pending[Tensor]:
        return self.meet(
            "all_to_all", x, lambda parts: [torch.stack([part[i] for part in parts]) for i in range(len(parts))]
        )


def _hash(x: Tensor) -> Tensor:
    """A hash of the tensor's bits."""
    return torch.hash_tensor(x) if x.numel() else x


def _reduced(parts: list[Tensor], op: ReduceOp) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        if op == "sum":
            total += part
        else:
            torch.maximum(total, part, out=total)
    return total


class VirtualComm(Comm):
    """The counterpart of DistributedComm for the threads of a World."""

    def __init__(
        self,
        *,
        world: World,
        rank: int,
        coordinate: Mapping[str, int],
        groups: Mapping[str, tuple[int, ...]],
        links: Mapping[Link, int],
        device: torch.device | None = None,
    ) -> None:
        if device is not None:
            self.device = device
        axes = {name: VirtualAxis(world, name, ranks, rank) for name, ranks in groups.items()}
        super().__init__(*axes_and_groups(coordinate, axes))
        self._world = world
        self._rank = rank
        self._links = links
        self._sent: Counter[Link] = Counter()
        self._awaited: Counter[Link] = Counter()
        self._everyone = VirtualAxis(world, "world", tuple(range(world.size)), rank)

    def _send(self, x: Tensor, link: Link) -> None:
        peer = self._links[link]
        self._world.mailboxes.setdefault((self._rank, peer, link), {})[self._sent[link]] = x.clone()
        self._sent[link] += 1
        self._world.mail_arrived(peer, self._rank, link)

    def _recv(self, shape: Sequence[int], dtype: torch.dtype, link: Link) -> Pending[Tensor]:
        peer, number = self._links[link], self._awaited[link]
        self._awaited[link] += 1

        def finish() -> Tensor:
            mailbox = self._world.mailboxes.setdefault((peer, self._rank, link), {})
            while number not in mailbox:
                self._world.wait_for_mail(self._rank, peer, link)
            x = mailbox.pop(number)
            if tuple(x.shape) != tuple(shape) or x.dtype != dtype:
                raise RuntimeError(
                    f"rank {self._rank} expects {dtype}{list(shape)} from rank {peer}, "
                    f"which sent {x.dtype}{list(x.shape)}"
                )
            return x

        return Pending(finish)

    def barrier(self) -> None:
        if self._world.size > 1:
            self._everyone.all_reduce(torch.zeros(1))

    def any(self, flag: bool) -> bool:
        return bool(self._everyone.all_reduce(torch.tensor([float(flag)]), "max"))

    def gather_texts(self, text: str) -> list[str]:
        room = torch.zeros(1 << 12, dtype=torch.uint8)
        data = text.encode()[: len(room)]
        room[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        rows = [room] if self._world.size == 1 else self._everyone.all_gather(room, dim=0).view(self._world.size, -1)
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in rows]
