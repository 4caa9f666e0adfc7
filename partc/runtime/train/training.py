"""The training of one rank: steps, and between them evaluations, checkpoints and logs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from ..checkpoint.checkpoint import Held, RankPosition, Saver
from ..checkpoint.safetensors import save as save_tensors
from ..checkpoint.state import left_out, restore_left_out, restore_optimizer, restore_scale, state
from ..comm.comm import Comm
from ..device.cuda_graphs import RecordedGraph, recording
from ..device.determinism import explained_errors
from ..device.garbage_collection import collected
from ..device.host_memory import peak_bytes
from ..documents import decoded
from ..errors import tell, writing
from ..execution.executor import GradientMemory, gradient_memory, make_stages
from ..execution.stage import PipelineStage
from ..layout import ModelView, Shard, tokens_per_step
from ..optimizer.gradients import Gradients
from ..optimizer.optimizer import Optimizer
from ..optimizer.reach import Reach
from ..optimizer.update import LossScale, Rate, Update, make_update, write_casts
from ..plan import PlanRouter
from ..processes.interruption import Interruption, VirtualInterruption
from ..refusal import remove_refusal
from ..whole_files import write_whole
from .data import BatchSource
from .evaluation import Evaluation
from .feed import Feed
from .job import Job
from .log import StepLog
from .rank import Rank
from .step_times import Times
from .steps import Done, Steps


def train(
    job: Job,
    rank: Rank,
    comm: Comm,
    data: BatchSource,
    model_file: ModuleType,
    device: torch.device,
    store: Store,
    interruption: Interruption | VirtualInterruption | None = None,
) -> None:
    """Train one rank to the end of the job, or to an interruption."""
    times = Times.of(job, comm, rank.number, rank.place.links, rank.place.stages)
    peak = times.peak(job) if job.measures else None
    log, saver = _log(job, rank, peak), _saver(job, rank, store)
    rank.done = job.start
    with torch.no_grad(), recording(job.cuda_graphs, device) as graph, explained_errors(), ExitStack() as stack:
        trained = _Trained.of(job, rank, comm)
        trained.restore(device)
        training = _Training(
            job=job,
            rank=rank,
            comm=comm,
            device=device,
            data=data,
            times=times,
            log=log,
            saver=saver,
            trained=trained,
            steps=_steps(job, rank, comm, data, device, trained, saver, graph),
            evaluation=Evaluation(
                job=job, model_file=model_file, place=rank.place, comm=comm, device=device, parameters=rank.parameters
            ),
            collect=(lambda done: None) if job.virtual else stack.enter_context(collected()),
        )
        training.run(interruption)
    times.close()
    training.end()


def _log(job: Job, rank: Rank, peak: tuple[float, str] | None) -> StepLog | None:
    if not rank.logs:
        return None
    return StepLog(
        job.metrics,
        job.steps,
        rank=rank.number,
        start=job.start,
        tokens=tokens_per_step(job.plan) * job.accumulate,
        flops=job.plan["flops"] * job.accumulate,
        peak=peak,
        board=job.tensorboard,
    )


def _saver(job: Job, rank: Rank, store: Store) -> Saver | None:
    if job.save is None:
        return None
    place = RankPosition(rank=rank.number, world_size=job.world_size, sizes=job.sizes, coordinate=rank.place.coordinate)
    return Saver(job.save, keep=job.keep, place=place, store=store, attempt=job.attempt, run=job.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """The stages of a rank, and its parameters, gradients and optimizer by the model's own names."""

    job: Job
    rank: Rank
    view: ModelView
    parameters: Mapping[str, Tensor]
    memory: GradientMemory
    names: tuple[str, ...]  # names of trained parameters
    optimizer: Optimizer | None
    scaled: Gradients
    stages: Mapping[int, PipelineStage]
    scale: LossScale | None
    reach: Reach

    @classmethod
    def of(cls, job: Job, rank: Rank, comm: Comm) -> _Trained:
        memory = gradient_memory(
            rank.shards,
            rank.parameters,
            rank.stage_classes.values(),
            job.sizes,
            compiled=rank.compiled,
            compressed="compress_grads" in job.plan["command"],
        )
        view = ModelView(rank.shards, job.sizes, rank.place.coordinate)
        parameters, gradients = view.tensors(rank.parameters), view.tensors(memory.gradients)
        counts = {name: gradients.pop(name) for name in view.counters}
        reach = Reach(gradients, job.plan["parameters"], counts)
        optimizer, scaled = make_update(
            job.recipe.all_settings(job.dims),
            parameters,
            gradients,
            {tuple(view.names(names)): buffer for names, buffer in memory.buffers.items()},
            rank.kernels,
            shards=view.shards,
            comm=comm,
            sizes=job.sizes,
            lr=job.lr,
            graphs=job.cuda_graphs,
            partly=bool(reach),
        )
        rank.parameters.update(view.joined(parameters, rank.parameters))
        for name in view.counters:
            del parameters[name]
        stages = make_stages(rank.stage_classes, comm, rank.parameters, memory)
        if optimizer is not None:
            write_casts(optimizer, stages.values())
        return cls(
            job=job,
            rank=rank,
            view=view,
            parameters=parameters,
            memory=memory,
            names=tuple(gradients),
            optimizer=optimizer,
            scaled=scaled,
            stages=stages,
            scale=LossScale() if job.plan["precision"] == "fp16" else None,
            reach=reach,
        )

    @property
    def _held_parameters(self) -> dict[str, tuple[Shard, Tensor]]:
        return {name: (shard, self.parameters[name]) for name, shard in self.view.shards.items()}

    @property
    def _optimized(self) -> dict[str, tuple[Shard, Tensor]]:
        held = self._held_parameters
        return {name: held[name] for name in self.names}

    def restore(self, device: torch.device) -> None:
        """Restore the checkpoint's states other than parameters. Does nothing without a checkpoint."""
        checkpoint, sizes, coordinate = self.job.checkpoint, self.job.sizes, self.rank.place.coordinate
        if checkpoint is None:
            return
        if self.optimizer is not None:
            restore_optimizer(self.optimizer, self._optimized, checkpoint, sizes, coordinate)
        if self.scale is not None:
            restore_scale(self.scale, checkpoint)
        if not restore_left_out(self.stages, checkpoint, sizes, coordinate, device) and self.rank.number == 0:
            tell("discarded the error feedback of compressed gradients: it belongs to another mesh or other buckets")
        checkpoint.close()

    def state(self) -> dict[str, Held]:
        """The tensors of a checkpoint."""
        saved = state(self._held_parameters, self._optimized, self.optimizer, self.job.plan, self.scale)
        return saved | left_out(self.stages, self.job.sizes, self.rank.place.coordinate)

    def update(self, comm: Comm) -> Update:
        job = self.job
        return Update(
            self.optimizer,
            self.scaled,
            {name: self.view.shards[name] for name in self.names if name not in job.balance},
            comm,
            job.sizes,
            Rate(base=job.lr, warmup=job.warmup, decline=job.lr_schedule, least=job.min_lr, steps=job.steps),
            clip=job.clip,
            scale=self.scale,
            norms=job.measures,
            reach=self.reach,
        )


def _steps(
    job: Job,
    rank: Rank,
    comm: Comm,
    data: BatchSource,
    device: torch.device,
    trained: _Trained,
    saver: Saver | None,
    graph: Callable[[], RecordedGraph] | None,
) -> Steps:
    """The steps of a rank whose stages have been set up."""
    comm.clock.entering("setup")
    routers = (decoded(PlanRouter, each) for each in job.plan.get("routers", ()))
    comm.loads.expect(routers, trained.stages, device, counted=job.measures or job.report is not None)
    comm.expect(job.plan["draws"], job.plan["microbatches"] if job.plan["repeated"] else 1)
    for stage in trained.stages.values():
        stage.setup()

    def part_of(number: int) -> Mapping[str, Tensor]:
        return data.part(number, rank.inputs, job.sizes, rank.place.coordinate)

    ahead = int(device.type == "cuda") if job.prefetch is None else job.prefetch
    return Steps(
        job=job,
        comm=comm,
        coordinate=rank.place.coordinate,
        device=device,
        stages=trained.stages,
        actions=rank.actions,
        acks=rank.acks,
        inputs=rank.inputs,
        parameters=rank.parameters,
        gradients=trained.memory.gradients,
        scaled=trained.scaled,
        update=trained.update(comm),
        scale=trained.scale,
        part_of=Feed(part_of, end=job.steps * job.accumulate, ahead=ahead, pin=device.type == "cuda"),
        finish_saving=saver.wait if saver is not None else lambda: None,
        graph=graph,
    )


@dataclass(kw_only=True)
class _Training:
    """The loop over a rank's steps."""

    job: Job
    rank: Rank
    comm: Comm
    device: torch.device
    data: BatchSource
    times: Times
    log: StepLog | None
    saver: Saver | None
    trained: _Trained
    steps: Steps
    evaluation: Evaluation
    collect: Callable[[int], None]  # collects garbage after a step
    measuring: float = 0.0  # seconds between two steps, which count towards the throughput of the second one

    def run(self, interruption: Interruption | VirtualInterruption | None) -> None:
        """Run all steps, or those before an interruption."""
        self.times.begin(self.job.start)
        for step in range(self.job.start, self.job.steps):
            if interruption is not None and interruption.before(step):
                break
            done = self.steps.run(step)
            if self.saver is not None and self.saver.behind(step + 1, self.job.save_slack):
                self.comm.clock.entering("the writing of a checkpoint")
                self.saver.complete(self.comm.barrier)
            self._measure(step, done)
            if self.job.record:
                self._record(self.job.record, step, done)
            self.rank.done = step + 1
            if self.saver is not None and self.job.saves_after(step + 1):
                self.comm.clock.entering("saving")
                self._save(self.saver)

    def _measure(self, step: int, done: Done) -> None:
        """Run an evaluation if one is due, and log the step."""
        seconds, aside = done.seconds + self.measuring, {"data": done.data, "measuring": self.measuring}
        self.rank.seconds.append(seconds)
        begun = time.perf_counter()
        split = self.times.end(step)
        evaluated = self.evaluation.run() if self.evaluation.due(step + 1) else None
        if self.log is not None and done.loss is not None:
            self.rank.losses.append(done.loss)
            peak = peak_bytes(self.device)
            self.log.step(step, done.loss, seconds, done.updated, peak, split, aside, evaluated, done.loads)
        self.collect(step + 1)
        self.measuring = time.perf_counter() - begun

    def _record(self, folder: Path, step: int, done: Done) -> None:
        recorded = done.recorded | {f"parameter/{name}": x for name, x in self.trained.parameters.items()}
        with writing(folder, self.rank.number):
            folder.mkdir(parents=True, exist_ok=True)
            save_tensors(folder / f"step_{step + 1:04d}_rank_{self.rank.number:03d}.safetensors", recorded)

    def _save(self, saver: Saver) -> None:
        done = self.rank.done
        saver.save(done, self.trained.state(), position=self.data.position(done * self.job.accumulate - 1))

    def end(self) -> None:
        """Save the last step, and write the reports."""
        if self.saver is not None:
            if self.rank.done not in (self.saver.saved, self.job.start):
                self._save(self.saver)
            self.comm.clock.entering("the writing of the last checkpoint")
            self.saver.wait()
        if self.log is not None:
            self.log.close()
        if self.job.report:
            with writing(self.job.report, self.rank.number):
                self._write_report(self.job.report)

    def _write_report(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        remove_refusal(folder)
        report = {
            "rank": self.rank.number,
            "peak_bytes": peak_bytes(self.device),
            "step_seconds": self.rank.seconds,
            "batches_per_step": self.job.accumulate,
            "losses": self.rank.losses,
            "logs": self.rank.logs,
            **({"expert_rows": rows} if (rows := self.comm.loads.rows) else {}),
        }
        write_whole(folder / f"rank_{self.rank.number:03d}.json", json.dumps(report))
