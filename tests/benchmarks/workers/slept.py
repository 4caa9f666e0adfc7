"""One rank of a pipeline that sleeps where it would compute: transfers, and waits for them, are what remains.

The side `package` runs the package's own train.py, whose stages sleep; the side `pp` runs torch's Schedule1F1B, whose stage
module sleeps. What crosses between stages is as large as in the package. Other work on the machine disturbs a sleep little,
so the sides compare on a busy machine too.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from gate import Task, read_task, wait_for_round
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

FORWARD, INPUTS, WEIGHTS = 0.1, 0.1, 0.1  # seconds of a microbatch on each stage: two thirds are the backward pass


def package(task: Task) -> int:
    stages = [importlib.import_module(f"stages.stage_{index}").Stage for index in range(2)]
    crossing = {name: torch.zeros(value.shape) for name, value in stages[1].receives.items()}

    def forward(self: Any, *_: Any) -> tuple[dict[str, Tensor], list[Any]]:
        time.sleep(FORWARD)
        return {**{name: crossing[name].clone() for name in self.sends}, "loss": torch.zeros(())}, []

    def inputs(self: Any, *_: Any) -> tuple[dict[str, Tensor], list[Any]]:
        time.sleep(INPUTS)
        return {name: crossing[name].clone() for name in self.receives}, []

    def weights(self: Any, *_: Any) -> None:
        time.sleep(WEIGHTS)

    def backward(self: Any, *_: Any) -> dict[str, Tensor]:
        time.sleep(INPUTS + WEIGHTS)
        return {name: crossing[name].clone() for name in self.receives}

    for stage in stages:
        stage.forward, stage.backward = forward, backward
        stage.backward_input, stage.backward_weight = inputs, weights
    train: Any = importlib.import_module("runtime.train.train")
    steps: Any = importlib.import_module("runtime.train.steps").Steps
    run = steps.run

    def run_when_told(self: Any, step: int) -> Any:
        wait_for_round(task, step)
        done = run(self, step)
        return replace(done, seconds=done.seconds - done.data)

    steps.run = run_when_told
    status: int = train.main(["--steps", str(task.total), "--report", str(task.report)], task.package)
    return status


class Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        time.sleep(INPUTS + WEIGHTS)
        return grad.clone(), torch.zeros(1)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Sleeping.apply(x, self.weight)
        return result


def peer(task: Task) -> int:
    (received,) = importlib.import_module("stages.stage_1").Stage.receives.values()
    microbatches = json.loads((task.package / "plan.json").read_text())["microbatches"]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage = PipelineStage(Part(), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=lambda y, _: y.sum(), scale_grads=False)
    batch = torch.zeros(received.shape[0] * microbatches, *received.shape[1:])
    seconds: list[float] = []
    for step in range(task.total):
        wait_for_round(task, step)
        started = time.perf_counter()
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=[], return_outputs=False)
        seconds.append(time.perf_counter() - started)
    losses = [0.0] * (rank * task.total)
    report = {"rank": rank, "peak_bytes": 0, "step_seconds": seconds, "losses": losses}
    task.report.mkdir(parents=True, exist_ok=True)
    (task.report / f"rank_{rank:03d}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def main() -> int:
    task = read_task()
    sys.path.insert(0, str(task.package))
    torch.set_num_threads(1)
    return package(task) if task.side == "package" else peer(task)


if __name__ == "__main__":
    raise SystemExit(main())
