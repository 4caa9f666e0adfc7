"""Sums of gradients over ranks, in buckets; the stage modules say when the collectives of a sum start.

If only some of the ranks share a node, a sum is hierarchical: a reduce-scatter inside each node, a sum of equal
parts between nodes, and an all-gather inside each node. Each rank sends only its part across nodes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.comm import Comm, Pending, runs
from ..comm.compression import Codec, Compressed
from ..layout import DTYPES, Shard
from ..ops.accumulation import materialized
from .parts import DONE, Parts

Chain = Generator[Pending[Tensor], Tensor, None]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are summed over ranks together: those from `first` to `last` in the stage's table, or `names`."""

    over: tuple[str, ...]
    first: str = ""
    last: str = ""
    names: tuple[str, ...] = ()
    scatter: bool = False  # whether each rank keeps only the sum of its part

    def among(self, shards: Mapping[str, Shard]) -> tuple[str, ...]:
        """The bucket's parameters, in the order of the stage's table."""
        if self.names:
            return self.names
        table = list(shards)
        between = table[table.index(self.first) : table.index(self.last) + 1]
        return tuple(name for name in between if shards[name].trainable and self._axes_of(shards[name]) == self.over)

    def _axes_of(self, shard: Shard) -> tuple[str, ...]:
        return () if shard.shared else shard.gather if self.scatter else shard.reduce


class Sums(dict[str, "Sum"]):
    """The sums of a stage's buckets by name. Scattered buckets are sums of `parts`: gradients of whole parameters.

    `near` are the axes whose ranks share a node, if not all do; `wire` is the dtype of sums, if it differs from the
    gradients'; `compress` is the compression between nodes, or everywhere if `near` is empty.
    """

    def __init__(
        self,
        comm: Comm,
        shards: Mapping[str, Shard],
        gradients: Mapping[str, Tensor],
        buckets: Mapping[str, Bucket],
        parts: Parts | None = None,
        *,
        near: tuple[str, ...] = (),
        wire: str = "",
        compress: str | Codec = "",
    ) -> None:
        for key, bucket in buckets.items():
            names = bucket.among(shards)
            if bucket.scatter and parts is not None:
                self[key] = Scatter(parts, names)
                continue
            inside = tuple(axis for axis in bucket.over if axis in near)
            between = tuple(axis for axis in bucket.over if axis not in near)
            summed = {name: gradients[name] for name in names}
            self[key] = Sum(comm, summed, inside, between, DTYPES[wire] if wire else None, compress)

    @property
    def compressed(self) -> dict[tuple[str, int], Compressed]:
        """Compressed sums, by (first gradient of the bucket, index of the piece of memory)."""
        return {key: found for each in self.values() for key, found in each.compressed.items()}


class Sum:
    """The sum of a bucket: a chain of collectives for each piece of memory that holds its gradients."""

    def __init__(
        self,
        comm: Comm,
        gradients: Mapping[str, Tensor],
        near: tuple[str, ...],
        far: tuple[str, ...],
        wire: torch.dtype | None,
        compress: str | Codec,
    ) -> None:
        self._comm, self._gradients, self._near, self._far = comm, gradients, near, far
        self._wire, self._compress = wire, compress
        self._going: list[tuple[Chain, Pending[Tensor]]] = []
        self.compressed = dict(self._compressing()) if compress and far else {}

    def _compressing(self) -> Iterator[tuple[tuple[str, int], Compressed]]:
        ways = self._comm.group(self._near).size if self._near else 1
        for index, run in enumerate(runs(list(self._gradients.values()))):
            group = self._comm.group(self._far)
            yield (next(iter(self._gradients)), index), Compressed(self._compress, group, -(-run.numel() // ways))

    def start(self) -> None:
        """Start the first collective of every chain."""
        first = next(iter(self._gradients))
        for index, run in enumerate(runs([materialized(x) for x in self._gradients.values()])):
            chain = self._chain(run, (first, index))
            self._going.append((chain, next(chain)))

    def advance(self) -> None:
        """Wait for the collectives in progress, and start the next ones."""
        self._going = [(chain, chain.send(pending.wait())) for chain, pending in self._going]

    def wait(self) -> None:
        """Wait for the last collectives; afterwards the gradients are the sums."""
        while self._going:
            chain, pending = self._going.pop(0)
            try:
                chain.send(pending.wait())
            except StopIteration:
                continue
            raise RuntimeError("a sum of gradients was waited for before its last collective had started")

    def _chain(self, run: Tensor, piece: tuple[str, int]) -> Chain:
        x = run.to(self._wire) if self._wire else run
        if not self._far or not (self._near or self._compress):
            total = yield self._comm.group(self._near or self._far).start_all_reduce_(x)
            if x is not run:
                run.copy_(total)
            return
        if self._near:
            node = self._comm.group(self._near)
            x = yield node.start_reduce_scatter(torch.nn.functional.pad(x, (0, -x.numel() % node.size)), dim=0)
        if self._compress:
            x = yield from self.compressed[piece].sum(x, self._comm.scale)
        else:
            x = yield self._comm.group(self._far).start_all_reduce_(x)
        if self._near:
            x = yield node.start_all_gather(x, dim=0)
        run.copy_(x[: run.numel()])


class Scatter(Sum):
    """The sum of a scattered bucket: each rank keeps a part of the sum."""

    compressed: dict[tuple[str, int], Compressed]

    def __init__(self, parts: Parts, names: Sequence[str]) -> None:
        self._parts, self._names, self._pending = parts, names, DONE
        self.compressed = {}

    def start(self) -> None:
        self._pending = self._parts.scatter_sums(*self._names)

    def advance(self) -> None:
        self._pending.advance()

    def wait(self) -> None:
        self._pending.wait()
