"""Training steps on one rank: forward and backward of the step's batches, then an update.

The device's work is in three functions, which only read memory that the host has written before: `_batch` for each
batch, `_measure` and `_update`. With CUDA graphs they are recorded once and then replayed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..device.cuda_graphs import RecordedGraph, RecordedWork
from ..device.sending import finish, send, to_device
from ..errors import UsageError
from ..execution.executor import Acks, Action, run_step
from ..execution.stage import PipelineStage
from ..layout import Shard
from ..ops.accumulation import clear, complete
from ..optimizer.gradients import Gradients
from ..optimizer.update import LossScale, Update, Updated
from . import nonfinite
from .data import in_microbatches
from .job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The results of a step."""

    loss: float | None  # the loss of the whole batch, on ranks of the stage that computes it
    seconds: float  # from the first batch to the end of the update; includes the device's work if the host waits for it
    data: float  # the part of `seconds` in which the host prepares batches and copies them to the device
    updated: Updated
    recorded: dict[str, Tensor]  # gradients, if the job records them
    loads: Mapping[str, float]  # the spreads of experts' loads


@dataclass(kw_only=True)
class Steps:
    """The steps of one rank. `inputs` are the entries of the batch that its stages read."""

    job: Job
    comm: Comm
    coordinate: Mapping[str, int]
    device: torch.device
    stages: Mapping[int, PipelineStage]
    actions: Sequence[Action]
    acks: Acks  # acknowledgements by other ranks' values
    inputs: Mapping[str, Shard]
    parameters: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    scaled: Gradients
    update: Update
    scale: LossScale | None
    part_of: Callable[[int], Mapping[str, Tensor]]  # batch number -> this rank's part, on the host
    finish_saving: Callable[[], None]  # called before an error that ends the run
    graph: Callable[[], RecordedGraph] | None = None  # creates a graph, if steps are recorded

    def __post_init__(self) -> None:
        self._local: dict[str, Tensor] = {}  # this rank's part of a batch
        self._norm: Tensor | None = None
        self._batches: dict[tuple[bool, bool], Callable[[], Tensor | None]] = {}
        self._measured = self._recorded(self._measure)
        self._updated = self._update if self.update.partly else self._recorded(self._update)

    def _recorded(self, work: Callable[[], Any]) -> Callable[[], Any]:
        return work if self.graph is None else RecordedWork(work, self.graph())

    def run(self, step: int) -> Done:
        """Run a step, counted from 0. Raises UsageError P0528 on all ranks."""
        clock = self.comm.clock
        clock.step = step + 1
        started = time.perf_counter()
        if self.scale is not None:
            self.comm.scales(self.scale.value)
        self.comm.loads.clear()
        data, losses = 0.0, list[Tensor | None]()
        for index in range(self.job.accumulate):
            clock.entering("data")
            number = step * self.job.accumulate + index
            begun = time.perf_counter()
            self.copy_in(self.part_of(number))
            data += time.perf_counter() - begun
            self.comm.begins(self.job.seed, number)
            first, last = index == 0, index == self.job.accumulate - 1
            made = self.run_batch(first, last)
            losses.append(made if last or made is None else made.clone())
            if self.job.check_nans:
                self._check(step, made, partial(self._batch, first, last))
        clock.entering("the update", "work")
        norm = self.measure()
        recorded = {f"gradient/{name}": self.scaled.copy(name) for name in self.scaled.names} if self.job.record else {}
        goes_on = self.update.begin(step, norm)
        if goes_on:
            self.apply_update()
        known = [loss.item() for loss in losses if loss is not None]
        updated = self.update.ended(step, norm, skipped=not goes_on)
        self._norm = None
        if self.job.report is not None:
            finish(self.device)  # ranks without a loss have launched their work without waiting for it
        seconds = time.perf_counter() - started
        loss = sum(known) / self.job.accumulate if known else None
        reported = self.job.report is not None and step + 1 == self.job.steps
        loads = self._loads() if self.job.measures or reported else {}
        return Done(loss=loss, seconds=seconds, data=data, updated=updated, recorded=recorded, loads=loads)

    def _loads(self) -> dict[str, float]:
        self.comm.clock.entering("the loads of its experts")

        def summed(x: Tensor, axis: str) -> Tensor:
            return self.comm.group((axis,)).all_reduce(x)

        return self.comm.loads.spreads(summed, pipeline=self.job.sizes.get("pp", 1) > 1)

    def copy_in(self, part: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of a batch to the device."""
        if self.graph is None or not self._local:
            # Replays write to these later.
            part = part if self.graph is None else {name: x.clone() for name, x in part.items()}
            self._local = {name: to_device(x, self.device) for name, x in part.items()}
            return
        for name, x in part.items():
            there = self._local[name]
            if x.dtype != there.dtype:
                raise UsageError(
                    "P0533",
                    f"steps cannot be repeated: {name} of the batch is {x.dtype} on this rank, and was {there.dtype}",
                    "have data(step) of the model file return equal types, or add --no-cuda-graphs",
                )
            send(x, there)

    def run_batch(self, first: bool, last: bool) -> Tensor | None:
        """Forward and backward of the batch on the device, the first or last one of a step; returns its loss."""
        if (first, last) not in self._batches:
            self._batches[first, last] = self._recorded(partial(self._batch, first, last))
        if self.graph is not None:
            self.comm.clock.entering("forward and backward", "work")
        return self._batches[first, last]()

    def _batch(self, first: bool, last: bool) -> Tensor | None:
        microbatches = in_microbatches(self._local, self.inputs, self.job.sizes, self.job.plan["microbatches"])
        self.comm.clock.entering("clearing gradients", "work")
        if first:
            clear(self.gradients.values())
        return run_step(
            self.stages, self.comm, self.actions, self._local, microbatches, first=first, last=last, acks=self.acks
        )

    def measure(self) -> Tensor | None:
        """Complete the step's gradients. Returns their norm if it is needed."""
        self._norm = self._measured()
        return self._norm

    def apply_update(self) -> None:
        """Update the parameters, after `measure`."""
        self._updated()

    def _measure(self) -> Tensor | None:
        complete(self.gradients.values())
        return self.update.measure(self.job.accumulate)

    def _update(self) -> None:
        self.update.apply(self._norm)
        for stage in self.stages.values():
            if stage.parts is not None:
                stage.parts.refresh()

    def _check(self, step: int, made: Tensor | None, run: Callable[[], object]) -> None:
        """Stop all ranks if a loss is not finite, and name the operation that caused it."""
        self.comm.clock.entering("the check of its loss")
        loss = None if made is None else made.item()
        if self.comm.any(loss is not None and not math.isfinite(loss)):
            self.finish_saving()
            calls = self.job.plan["calls"]
            raise nonfinite.explain(self.comm, step, loss, self.stages, self.parameters, self._local, calls, run)
