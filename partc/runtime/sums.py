"""Gradients summed over ranks, in buckets: each starts while backward goes on, and is waited for at the step's end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .comm import Comm, Pending, runs
from .layout import Shard
from .parts import Parts


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are complete after the last backward of the call `after`, and summed over the same axes.

    Those of a stage's parameters from `first` to `last`, or those of `names`.
    """

    after: str
    over: tuple[str, ...]
    first: str = ""
    last: str = ""
    names: tuple[str, ...] = ()

    def among(self, shards: Mapping[str, Shard]) -> tuple[str, ...]:
        """Its parameters, in the order of the stage's table."""
        if self.names:
            return self.names
        table = list(shards)
        between = table[table.index(self.first) : table.index(self.last) + 1]
        return tuple(name for name in between if shards[name].trainable and _over(shards[name]) == self.over)


def _over(shard: Shard) -> tuple[str, ...]:
    """What a gradient is scattered over, or else summed over; nothing for one that waits for other ranks."""
    return () if shard.shared else shard.gather or shard.reduce


class Sums:
    """The buckets of a stage. What ranks hold in parts is scattered; its whole gradient is then `parts`' own."""

    def __init__(
        self,
        comm: Comm,
        shards: Mapping[str, Shard],
        gradients: Mapping[str, Tensor],
        buckets: Sequence[Bucket],
        parts: Parts | None = None,
    ) -> None:
        self._comm = comm
        self._gradients = gradients
        self._parts = parts
        self._buckets: dict[str, list[tuple[Bucket, tuple[str, ...], bool]]] = {}
        for bucket in buckets:
            names = bucket.among(shards)
            scattered = bool(shards[names[0]].gather)
            self._buckets.setdefault(bucket.after, []).append((bucket, names, scattered))
        self._going: list[Pending[Any]] = []

    def start(self, call: str) -> None:
        """After the backward of a call: if it was the last before the update, start what is complete."""
        if not self._comm.last:
            return
        for bucket, names, scattered in self._buckets.get(call, ()):
            if scattered and self._parts is not None:
                self._parts.scatter_sums(*names)
                continue
            axis = self._comm.group(bucket.over)
            for run in runs([self._gradients[name] for name in names]):
                self._going.append(axis.start_all_reduce_(run))

    def finish(self) -> None:
        """Wait for all that has been started."""
        while self._going:
            self._going.pop(0).wait()
        if self._parts is not None:
            self._parts.settle()
