"""Evaluations between steps: the model file's `evaluate`, forward only, on the training's ranks and parameters."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..device.sending import to_device
from ..execution.executor import parse_schedule, run_forward
from ..execution.stage import PipelineStage
from ..layout import Shard
from ..place import Place
from .data import BatchSource, Say, Tokens, source
from .data import in_microbatches as cut
from .job import Job

NAME = "eval_data"  # the function's name in the model file


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The evaluations of one rank. Their stages, and the parameters that these gather, exist only while one runs."""

    job: Job
    model_file: ModuleType
    place: Place
    comm: Comm
    device: torch.device
    parameters: Mapping[str, Tensor]

    def due(self, done: int) -> bool:
        """Whether an evaluation is due after this number of steps."""
        return bool(self.job.eval_every) and (done % self.job.eval_every == 0 or done == self.job.steps)

    def run(self) -> dict[str, float]:
        """The means of `evaluate`'s scalars over the first batches of the data, on ranks of the stage that computes
        them.

        They have their names in the log: `evaluation` for a single scalar, `evaluation/loss` for one in a dict.
        """
        clock, job = self.comm.clock, self.job
        clock.entering("an evaluation")
        modules = {number: importlib.import_module(f"evaluation.stages.stage_{number}") for number in self.place.stages}
        stages: dict[int, PipelineStage] = {
            number: module.Stage(self.comm, self.parameters, {}) for number, module in modules.items()
        }
        for stage in stages.values():
            stage.setup()
        inputs: dict[str, Shard] = {name: shard for stage in stages.values() for name, shard in stage.inputs.items()}
        actions = parse_schedule(self.place.evaluation)
        batches, sums = evaluation_data(job, self.model_file), dict[str, float]()
        for number in range(job.eval_batches):
            clock.entering("data of an evaluation")
            part = batches.part(number, inputs, job.sizes, self.place.coordinate)
            local = {name: to_device(x, self.device) for name, x in part.items()}
            pieces = cut(local, inputs, job.sizes, job.plan["microbatches"])
            for path, value in run_forward(stages, self.comm, actions, local, pieces, job.sizes).items():
                name = f"evaluation/{path}" if path else "evaluation"
                sums[name] = sums.get(name, 0.0) + value.item()
        return {name: total / job.eval_batches for name, total in sums.items()}


def evaluation_data(job: Job, model_file: ModuleType, say: Say = lambda line: None) -> BatchSource:
    """The batches of an evaluation, from their beginning: --eval-data, or `eval_data` of the model file.

    Without either, batches of `batch()` under seeds that steps do not use.
    """
    tokens = None if job.eval_data is None else Tokens(job.eval_data, job.data_dtype, job.data_labels)
    how: dict[str, Any] = {"seed": job.seed, "dtype": job.dtype, "again": job.data_end == "repeat"}
    return source(model_file, job.plan, **how, tokens=tokens, say=say, name=NAME)
