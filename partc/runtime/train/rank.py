"""One rank of a training: its place, its stages' classes, and its tensors with initial values."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.given_parameters import initial_checkpoint
from ..errors import UsageError, tell
from ..execution.executor import Action, Slot, acknowledged_by, parse_schedule
from ..first_steps import FirstSteps
from ..layout import DTYPES, ModelView, Shard
from ..place import PIPELINE, Place
from ..processes.agreement import Together
from .init import initialise, state_dtypes
from .job import Job


@dataclass(slots=True)
class Rank:
    """One rank: its literals, its stages' classes, and its tensors."""

    place: Place
    stage_classes: dict[int, type[Any]]
    actions: tuple[Action, ...]
    kernels: ModuleType | None = None
    parameters: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    done: int = 0  # the number of steps done, including those before this run

    @property
    def number(self) -> int:
        return self.place.rank

    @property
    def shards(self) -> dict[str, Shard]:
        """The parameters of all its stages; if two stages use one, the last sums its gradient."""
        return {name: shard for stage in self.stage_classes.values() for name, shard in stage.parameters.items()}

    @property
    def acks(self) -> dict[Slot, tuple[int, ...]]:
        """Map the (stage, microbatch) of a peer's sent value to the microbatches whose gradients it confirms."""
        rows = map(parse_schedule, self.place.schedules.values())
        return {slot: acks for row in rows for slot, acks in acknowledged_by(row).items()}

    @property
    def inputs(self) -> dict[str, Shard]:
        """The batch entries that its stages read."""
        return {name: shard for stage in self.stage_classes.values() for name, shard in stage.inputs.items()}

    @property
    def compiled(self) -> bool:
        """Whether torch.compile makes kernels of the functions that its stages call."""
        return any(stage.compiled for stage in self.stage_classes.values())

    @property
    def logs(self) -> bool:
        """Whether this is the single rank that reports the loss."""
        others = (index for axis, index in self.place.coordinate.items() if axis != PIPELINE)
        return any(stage.loss is not None for stage in self.stage_classes.values()) and not any(others)


def load_rank(number: int, device: torch.device, job: Job) -> Rank:
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # runs Triton kernels without a GPU
    place = Place.of(number, job.sizes)
    stages = {stage: importlib.import_module(f"stages.stage_{stage}").Stage for stage in place.stages}
    kernels = importlib.import_module("kernels") if (job.root / "kernels").is_dir() else None
    return Rank(place, stages, parse_schedule(place.schedule), kernels)


def materialise(
    job: Job, model_file: ModuleType, ranks: Sequence[Rank], device: torch.device, together: Together
) -> None:
    """Give every rank its shards of the initial parameters, or of a checkpoint's parameters."""
    places = [_ModelTensors(rank, job.sizes, device) for rank in ranks]
    options = job.plan["options"]
    source = job.checkpoint
    if source is None and job.init is not None:
        source = initial_checkpoint(job.init, job.plan, lru_cache(lambda: state_dtypes(model_file, options)), together)
    if source is not None:
        for rank, place in zip(ranks, places, strict=True):
            for name, shard in place.shards.items():
                if name in source.tensors:
                    part = source.part(name, shard, job.sizes, rank.place.coordinate)
                    place.put(name, part.to(device=device, dtype=shard.dtype))
        source.close()

    def take(name: str, whole: Tensor) -> None:
        for rank, place in zip(ranks, places, strict=True):
            shard = place.shards.get(name)
            if shard is not None:
                part = shard.local(whole, job.sizes, rank.place.coordinate)
                place.put(name, part.to(device=device, dtype=shard.dtype, copy=True).contiguous())

    steps = FirstSteps.of_plan(job.plan)
    for name in () if steps is None else steps.buffers:
        if any(name in place.missing for place in places):
            entry = job.plan["parameters"][name]
            take(name, torch.zeros(entry["shape"], dtype=DTYPES[entry["dtype"]]))
    wanted = {name for place in places for name in place.missing}
    if not wanted:
        return
    parameters = job.plan["parameters"].values()
    size = sum(math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize for entry in parameters)
    say = tell if ranks[0].number == 0 else (lambda line: None)
    initialise(model_file, options, job.seed, wanted, take, size=size, say=say)
    for place in places:
        if place.missing:
            raise UsageError(
                "P0502",
                f"model.py makes no parameter {next(iter(place.missing))!r}, which the plan has",
                "compile again: model.py or its options have changed since",
            )


class _ModelTensors:
    """The destinations of a rank's parameters, by the model's own names; rows of stacks share a tensor."""

    def __init__(self, rank: Rank, sizes: Mapping[str, int], device: torch.device) -> None:
        stacks = {
            name: torch.zeros(shard.local_shape(sizes), dtype=shard.dtype, device=device)
            for name, shard in rank.shards.items()
            if shard.stacked or shard.members
        }
        own = ModelView(rank.shards, sizes, rank.place.coordinate)
        self.shards = own.shards
        self.missing = dict.fromkeys(self.shards)
        self._rows = own.tensors(stacks)
        self._parameters = rank.parameters
        rank.parameters.update(stacks)
        for name, shard in own.counters.items():
            rank.parameters[name] = torch.zeros(shard.local_shape(sizes), dtype=shard.dtype, device=device)

    def put(self, name: str, part: Tensor) -> None:
        if name in self._rows:
            self._rows[name].copy_(part)
        else:
            self._parameters[name] = part
        del self.missing[name]
