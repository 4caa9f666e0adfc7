"""Sums of gradients over ranks, in buckets; the stage modules decide when sums start and are waited for.

If some ranks share a node and others do not, a sum is hierarchical: a reduce-scatter inside each node, a sum of equal
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
from ..ops.accumulation import settled
from .parts import Parts

Sum = Generator[Pending[Tensor], Tensor, None]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are complete after the last backward of the call `after`, and are summed over the same axes.

    The parameters are those of the stage from `first` to `last`, or `names`. Without `after`, the bucket is summed at
    the step's end.
    """

    over: tuple[str, ...]
    after: str = ""
    first: str = ""
    last: str = ""
    names: tuple[str, ...] = ()
    scatter: bool = False  # each rank keeps the sum of a part

    def among(self, shards: Mapping[str, Shard]) -> tuple[str, ...]:
        """Its parameters, in the order of the stage's table."""
        if self.names:
            return self.names
        table = list(shards)
        between = table[table.index(self.first) : table.index(self.last) + 1]
        return tuple(name for name in between if shards[name].trainable and self._over(shards[name]) == self.over)

    def _over(self, shard: Shard) -> tuple[str, ...]:
        return () if shard.shared else shard.gather if self.scatter else shard.reduce


class Sums:
    """The sums of a stage's buckets. Scattered buckets are sums of `parts`: gradients of whole parameters.

    `near` are the axes whose ranks share a node, if others do not; `wire` is the dtype of sums, if it is not that of
    the gradients; `compress` is the code of gradients between nodes, or everywhere if `near` is empty.
    """

    def __init__(
        self,
        comm: Comm,
        shards: Mapping[str, Shard],
        gradients: Mapping[str, Tensor],
        buckets: Sequence[Bucket],
        parts: Parts | None = None,
        *,
        near: tuple[str, ...] = (),
        wire: str = "",
        compress: str | Codec = "",
    ) -> None:
        self._comm = comm
        self._gradients = gradients
        self._parts = parts
        self._near, self._wire, self._compress = near, wire, compress
        self._buckets: dict[str, list[tuple[Bucket, tuple[str, ...]]]] = {}
        for bucket in buckets:
            self._buckets.setdefault(bucket.after, []).append((bucket, bucket.among(shards)))
        self._going: list[_Going] = []
        self._scattering: list[Pending[None]] = []
        self.compressed = dict(self._compressing()) if compress else {}

    def _compressing(self) -> Iterator[tuple[tuple[str, int], Compressed]]:
        """Compressed sums, by the first gradient of the bucket and the piece of memory."""
        for bucket, names in (each for found in self._buckets.values() for each in found):
            near, far = self._split(bucket)
            for index, run in enumerate(runs([self._gradients[name] for name in names])):
                if far and not bucket.scatter:
                    ways = self._comm.group(near).size if near else 1
                    group = self._comm.group(far)
                    yield (names[0], index), Compressed(self._compress, group, -(-run.numel() // ways))

    def _split(self, bucket: Bucket) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes inside nodes, and those between nodes."""
        near = tuple(axis for axis in bucket.over if axis in self._near)
        return near, tuple(axis for axis in bucket.over if axis not in self._near)

    def start(self, call: str = "") -> None:
        """Start the sums of gradients that are complete after a call's last backward; by default, of the rest."""
        for bucket, names in self._buckets.get(call, ()):
            if bucket.scatter and self._parts is not None:
                for going in self._scattering:
                    going.go_on()
                self._scattering.append(self._parts.scatter_sums(*names))
                if not call:  # the next sums may be of the parts that each rank keeps of these
                    self._settle()
                continue
            near, far = self._split(bucket)
            for index, run in enumerate(runs([settled(self._gradients[name]) for name in names])):
                self._going.append(_Going(self._sum(run, near, far, (names[0], index)), inside=bool(near and far)))

    def relay(self) -> None:
        """In hierarchical sums: wait for the sums inside the node, and start those between nodes."""
        for scattered in self._scattering:
            scattered.go_on()
        for going in self._going:
            if going.inside:
                going.advance()

    def wait(self) -> None:
        """Wait for all sums that have been started."""
        self._settle()
        while self._going:
            if not self._going[0].advance():
                del self._going[0]

    def _settle(self) -> None:
        for going in self._scattering:
            going.go_on()
        while self._scattering:
            self._scattering.pop(0).wait()

    def _sum(self, run: Tensor, near: tuple[str, ...], far: tuple[str, ...], piece: tuple[str, int]) -> Sum:
        x = run.to(DTYPES[self._wire]) if self._wire else run
        if not far or not (near or self._compress):
            total = yield self._comm.group(near or far).start_all_reduce_(x)
            if x is not run:
                run.copy_(total)
            return
        if near:
            node = self._comm.group(near)
            x = yield node.start_reduce_scatter(torch.nn.functional.pad(x, (0, -x.numel() % node.size)), dim=0)
        if self._compress:
            x = yield from self.compressed[piece].sum(x, self._comm.scale)
        else:
            x = yield self._comm.group(far).start_all_reduce_(x)
        if near:
            x = yield node.start_all_gather(x, dim=0)
        run.copy_(x[: run.numel()])


class _Going:
    """A sum under way: its pending collective, and the function that starts the next one."""

    def __init__(self, sum: Sum, *, inside: bool) -> None:
        self._sum = sum
        self._pending: Pending[Tensor] = next(sum)
        self.inside = inside  # whether the pending collective stays inside a node

    def advance(self) -> bool:
        """Wait for the pending collective and start the next one; false if there is none."""
        self.inside = False
        try:
            self._pending = self._sum.send(self._pending.wait())
        except StopIteration:
            return False
        return True
