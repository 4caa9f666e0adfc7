"""A process whose rates are measured: `python -m partc.cluster.probe FILE.json`, started by `measurement`.

If a machine has more processes than cores, the excess processes wait while others compute, so that a core is measured.
In exchanges between nodes all processes of a node take part, since they share its link.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

_PRODUCTS = ((128, 64, 256), (256, 128, 512), (512, 512, 512), (1024, 256, 1024), (1024, 1024, 1024))  # m, k, n
_HEADS = ((16, 64, 32), (16, 128, 64), (32, 256, 64))  # heads of attention, rows and features of each
_DTYPES = {"f32": "float32", "f64": "float64", "bf16": "bfloat16"}
_ELEMENTS = (1 << 14, 1 << 17, 1 << 20)  # of exponential functions
_VECTORS = (1 << 17, 1 << 20, 1 << 23)  # elements of an addition
_COLD = 1 << 26  # bytes of operands in a cycle
_MESSAGES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)  # bytes
_GROUPS, _GROUP = 9, 0.02  # groups of runs of one operation, and the least seconds of a group
_ENOUGH = 0.5  # seconds of an exchange, after which no larger one is measured
_SEVERAL, _FEW = 9, 5  # exchanges of one size, if they are quick, and if they are slow
_ROW = 4  # exchanges with several processes in a row
# Seconds of products between two meetings of all processes, and the number of meetings.
_BETWEEN, _MEETINGS = 0.005, 200
_PAUSE = 0.05  # seconds from which an exchange counts as slow
MACHINE = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers and namespaces of a machine


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeProcess:
    """The place of a process among `nodes` nodes with `processes` processes each."""

    rank: int
    nodes: int
    processes: int
    address: str  # of the store, as init_process_group reads it

    @property
    def node(self) -> int:
        return self.rank // self.processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A measured duration of `work` flops, bytes, or elements."""

    kind: str  # product TYPE, attention, special, memory, launch, inside, between DISTANCE, alone, spread
    work: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """The seconds of products, of an exchange, and of both concurrently."""

    products: float
    exchange: float
    both: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The mean seconds of a process's products, of a barrier, and of products and a barrier in turn, which ends when
    the slowest process has computed its products.
    """

    products: float
    barrier: float
    both: float


def typical(run: Callable[[], object]) -> float:
    """The seconds of one run: the median of several groups of runs, as steps run in slow moments of the machine too."""
    run()
    start = time.perf_counter()
    run()
    count = max(1, int(_GROUP / max(1e-9, time.perf_counter() - start)))
    found = []
    for _ in range(_GROUPS):
        start = time.perf_counter()
        for _ in range(count):
            run()
        found.append((time.perf_counter() - start) / count)
    return statistics.median(found)


def _in_turn(make: Callable[..., Any], *shapes: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """An endless cycle over operands of these shapes. Together they exceed the caches, so that each is read from
    memory, as in a step.
    """
    first = tuple(make(*shape) for shape in shapes)
    others = range(_COLD // sum(x.nbytes for x in first))
    return itertools.cycle([first, *(tuple(make(*shape) for shape in shapes) for _ in others)])


class _Probe:
    def __init__(self, place: ProbeProcess) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._torch, self._dist, self._place = torch, dist, place
        world = place.nodes * place.processes
        dist.init_process_group("gloo", init_method=place.address, rank=place.rank, world_size=world)
        machines: list[Any] = [None] * world
        name = MACHINE.read_text() if MACHINE.exists() else f"node {place.node}"
        dist.all_gather_object(machines, name)
        self._turn = machines[: place.rank].count(name)  # its position among the processes of this machine
        self._beside = machines.count(name)
        self._machines = len(set(machines))

    def found(self) -> dict[str, Any]:
        cores = len(os.sched_getaffinity(0))
        samples = list(self._computing()) if self._turn < cores else []
        self._dist.barrier()
        samples += self._moving()
        overlap, meeting = self._overlap(), self._slowest_product()
        found: list[Any] = [
            {
                "samples": [asdict(sample) for sample in samples],
                "overlap": None if overlap is None else asdict(overlap),
                "meeting": None if meeting is None else asdict(meeting),
                "processors": cores * self._machines if self._beside > cores else 0,
                "beside": self._beside,
            }
        ]
        self._dist.broadcast_object_list(found)
        self._dist.destroy_process_group()
        document: dict[str, Any] = found[0]
        return document

    def _computing(self) -> Iterator[Sample]:
        torch = self._torch
        for name, dtype in _DTYPES.items():
            for m, k, n in _PRODUCTS:
                ones = partial(torch.ones, dtype=getattr(torch, dtype))
                three = _in_turn(ones, (m, k), (n, k), (m, n))

                def products(three: Iterator[Any] = three) -> None:  # forward, and both gradients
                    x, w, g = next(three)
                    torch.nn.functional.linear(x, w, w[:, 0])
                    g @ w
                    g.t() @ x

                yield Sample(kind=f"product {name}", work=2 * m * k * n, seconds=typical(products) / 3)
        for heads, rows, features in _HEADS:
            queries = _in_turn(partial(torch.ones, requires_grad=True), (1, heads, rows, features))

            def attention(queries: Iterator[Any] = queries) -> None:
                (q,) = next(queries)
                torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, q, q).sum(), q)

            # Two products forward, and five backward.
            yield Sample(kind="attention", work=7 * 2 * heads * rows**2 * features, seconds=typical(attention))
        for size in _ELEMENTS:
            one = _in_turn(torch.ones, (size,))
            seconds = typical(lambda one=one: torch.nn.functional.gelu(*next(one), approximate="tanh"))  # type: ignore[misc]
            yield Sample(kind="special", work=size, seconds=seconds)
        for size in _VECTORS:
            two = _in_turn(torch.ones, (size,), (size,))
            seconds = typical(lambda two=two: torch.add(*next(two)))  # type: ignore[misc]
            yield Sample(kind="memory", work=3 * 4 * size, seconds=seconds)
        small = torch.ones(4)
        yield Sample(kind="launch", work=0, seconds=typical(lambda: small + small))

    def _moving(self) -> list[Sample]:
        place, found = self._place, list[Sample]()
        here, near = divmod(place.rank, place.processes)
        if place.processes > 1:
            partner = place.rank + 1 if near % 2 == 0 else place.rank - 1
            found += self._exchanged("inside", partner if partner // place.processes == here else None)
        distance = 1
        while distance < place.nodes:
            there = here ^ distance
            counterpart = there * place.processes + near if there < place.nodes else None
            found += self._exchanged(f"between {distance}", counterpart)
            if distance == 1 and place.processes > 1:
                found += self._exchanged("alone", counterpart if near == 0 else None)
            distance *= 2
        if place.nodes > 2:
            others = ((here + distance) % place.nodes for distance in range(1, place.nodes))
            found += self._exchanged("spread", *(there * place.processes + near for there in others))
        return found

    def _exchanged(self, kind: str, *partners: int | None) -> Iterator[Sample]:
        """Yields the samples of exchanges of several sizes, by all processes concurrently; only the first process's
        count.
        """
        others = [partner for partner in partners if partner is not None]
        # Messages to several processes collide by chance, also with those of processes that have begun the next
        # exchange.
        several = len(partners) > 1
        for size in _MESSAGES:
            first = self._exchange(size, others)
            again = _SEVERAL if self._agreed(first) < _PAUSE else _FEW
            taken = [self._exchange(size, others, in_a_row=_ROW if several else 1) for _ in range(again)]
            seconds = self._agreed(statistics.median(taken) if several else min(taken))
            yield Sample(kind=kind, work=size * len(partners), seconds=seconds)
            if seconds > _ENOUGH:
                return

    def _agreed(self, seconds: float) -> float:
        shared_seconds = self._torch.tensor([seconds], dtype=self._torch.float64)
        self._dist.broadcast(shared_seconds, 0)
        return float(shared_seconds)

    def _exchange(self, size: int, partners: Sequence[int], in_a_row: int = 1) -> float:
        self._dist.barrier()
        start = time.perf_counter()
        for _ in range(in_a_row):
            for work in self._started(size, partners):
                work.wait()
        return (time.perf_counter() - start) / in_a_row

    def _started(self, size: int, partners: Sequence[int]) -> list[Any]:
        """Start the receives and then the sends of an exchange, in the order of the emitted programs."""
        dist, torch = self._dist, self._torch
        received, sent = torch.zeros(max(1, len(partners)), size // 4), torch.zeros(size // 4)
        going = [dist.irecv(row, partner) for row, partner in zip(received, partners, strict=False)]
        return going + [dist.isend(sent, partner) for partner in partners]

    def _overlap(self) -> Overlap | None:
        """The durations of products and of an exchange between the farthest pairs of processes, which alone take
        equally long.
        """
        dist, torch, place = self._dist, self._torch, self._place
        world = dist.get_world_size()
        if world == 1:
            return None
        half = world // 2
        partners = [(place.rank + half) % (2 * half)] if place.rank < 2 * half else []
        size = _MESSAGES[-1]
        while size > _MESSAGES[0] and self._agreed(self._exchange(size, partners)) > _ENOUGH:
            size //= 4
        x = torch.randn(256, 256)
        alone = self._agreed(statistics.median(self._exchange(size, partners) for _ in range(_FEW)))
        count = max(1, int(alone / self._agreed(typical(lambda: x @ x))))

        def products() -> float:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                x @ x
            return time.perf_counter() - start

        def product_and_sum() -> float:
            dist.barrier()
            start = time.perf_counter()
            going = self._started(size, partners)
            for _ in range(count):
                x @ x
            for work in going:
                work.wait()
            return time.perf_counter() - start

        computed = statistics.median(products() for _ in range(_FEW))
        return Overlap(
            products=computed, exchange=alone, both=statistics.median(product_and_sum() for _ in range(_FEW))
        )

    def _slowest_product(self) -> Meeting | None:
        dist, torch = self._dist, self._torch
        if dist.get_world_size() == 1:
            return None
        x = torch.randn(256, 256)
        alone = self._turn < len(os.sched_getaffinity(0))
        count = max(1, int(_BETWEEN / self._agreed(typical(lambda: x @ x) if alone else 0.0)))

        def meetings(products: int) -> tuple[float, float]:
            """The mean seconds of a process's products, and of these and a barrier."""
            computed = met = 0.0
            for _ in range(_MEETINGS):
                start = time.perf_counter()
                for _ in range(products):
                    x @ x
                ready = time.perf_counter()
                dist.barrier()
                computed += ready - start
                met += time.perf_counter() - start
            sums = torch.tensor([computed, met], dtype=torch.float64)
            dist.all_reduce(sums)
            own, both = (sums / (_MEETINGS * dist.get_world_size())).tolist()
            return own, both

        (_, barrier), (own, both) = meetings(0), meetings(count)
        return Meeting(products=own, barrier=barrier, both=both)


if __name__ == "__main__":
    given = ProbeProcess(**json.loads(Path(sys.argv[1]).read_text()))
    print(json.dumps(_Probe(given).found()))
