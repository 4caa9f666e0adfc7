"""The training loop of the package's train.py, on one rank of many or on all of them at once."""

from __future__ import annotations

import datetime
import importlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from ..checkpoint.checkpoint import Held, RankPosition, Saver
from ..checkpoint.given_parameters import given
from ..checkpoint.restore import Say
from ..checkpoint.safetensors import save as save_tensors
from ..checkpoint.state import left_out, restore_left_out, restore_optimizer, restore_scale, state
from ..clock import Clock
from ..comm.comm import Comm
from ..device.cuda_graphs import recording
from ..device.determinism import deterministic, told
from ..device.garbage_collection import collected
from ..device.host_memory import keep_freed_memory, peak_bytes
from ..documents import decoded
from ..errors import UsageError, enough_memory, tell, writing
from ..execution.executor import Action, Slot, gradient_memory, make_stages, parse_schedule, told_by
from ..layout import DTYPES, ModelView, Shard, tokens_per_step
from ..ops import attention_kernels
from ..optimizer.update import LossScale, Rate, Update, updating, write_casts
from ..place import PIPELINE, Place
from ..plan import PlanRouter, launches
from ..processes.agreement import Together
from ..processes.devices import own_device
from ..processes.interruption import Interruption, VirtualInterruption
from ..processes.ownership import sole
from ..processes.rendezvous import meet, world, world_size
from ..processes.signals import Caught, release
from ..processes.watchdog import Watchdog, breaking_off
from ..torch_private import lone_store
from ..whole_files import write_whole
from .data import BatchSource, Tokens, load_model_file, source
from .evaluation import Evaluation
from .feed import Feed
from .init import initialise, state_dtypes
from .job import Job, check_places, parse, prepared, told_of_memory
from .log import StepLog
from .step_times import Times
from .steps import Steps
from .tuning import settle


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
    done: int = 0  # steps, with those before this run

    @property
    def number(self) -> int:
        return self.place.rank

    @property
    def shards(self) -> dict[str, Shard]:
        """The parameters of all its stages; if two stages use one, the last sums its gradient."""
        return {name: shard for stage in self.stage_classes.values() for name, shard in stage.parameters.items()}

    @property
    def told(self) -> dict[Slot, tuple[int, ...]]:
        """By stage and microbatch of a value that a peer sends, the microbatches whose gradients the value confirms."""
        rows = map(parse_schedule, self.place.schedules.values())
        return {slot: told for row in rows for slot, told in told_by(row).items()}

    @property
    def inputs(self) -> dict[str, Shard]:
        """The batch entries that its stages read."""
        return {name: shard for stage in self.stage_classes.values() for name, shard in stage.inputs.items()}

    @property
    def compiled(self) -> bool:
        """Whether torch.compile makes kernels of the functions that its stages call."""
        return any(getattr(stage, "compiled", False) for stage in self.stage_classes.values())

    @property
    def logs(self) -> bool:
        """Whether this is the single rank that reports the loss."""
        others = (index for axis, index in self.place.coordinate.items() if axis != PIPELINE)
        return any(stage.loss is not None for stage in self.stage_classes.values()) and not any(others)


@dataclass(frozen=True, slots=True)
class Task:
    """A task of all ranks: they agree on the job, then each does its work."""

    prepared: Callable[[Job, Together, Say], Job]
    work: Callable[..., None]


def main(argv: Sequence[str], root: Path) -> int:
    """Train the package in `root`. Returns the exit code."""
    return run(lambda: parse(argv, root), Task(prepared, _train))


def run(job_of: Callable[[], Job], task: Task) -> int:
    """Do a task on all ranks, or on this one under torchrun. Returns the exit code."""
    try:
        job = job_of()
        here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")  # all ranks are on this machine
        if job.virtual or here:
            check_places(job)
        keep_freed_memory()
        with enough_memory("this process", Clock()), deterministic(job.deterministic), ExitStack() as stack:
            stopped = _run_virtual(job, stack, task) if job.virtual else _run_this_rank(job, task)
    except UsageError as error:
        if not error.alike or os.environ.get("RANK", "0") == "0":
            tell(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return job.exit_code if stopped else 0


def _load_rank(number: int, device: torch.device, job: Job) -> Rank:
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # runs kernels, if there are any, without a GPU
    place = Place.of(number, job.sizes)
    stages = {stage: importlib.import_module(f"stages.stage_{stage}").Stage for stage in place.stages}
    kernels = importlib.import_module("kernels") if (job.root / "kernels").is_dir() else None
    return Rank(place, stages, parse_schedule(place.schedule), kernels)


def _run_virtual(job: Job, stack: ExitStack, task: Task) -> bool:
    from ..comm.virtual import VirtualComm, World

    release()
    store = lone_store()
    together = Together(store, 0, 1)
    if job.save is not None:
        stack.callback(sole(job.save, together, timeout=job.timeout, say=tell))
    job = task.prepared(job, together, tell)
    if memory := told_of_memory(job):
        tell(memory)
    _settle_attention(job, torch.device("cpu"), tell)
    world = World(job.world_size)
    ranks = [_load_rank(number, torch.device("cpu"), job) for number in range(job.world_size)]
    model_file = load_model_file(job.root / "model.py")
    _materialise(job, model_file, ranks, torch.device("cpu"), together)
    data = batches_of(job, model_file, tell, kept=2)  # no rank is two batches behind another

    def work(number: int) -> None:
        rank = ranks[number]
        comm = VirtualComm(
            world=world,
            rank=number,
            coordinate=rank.place.coordinate,
            groups=rank.place.groups,
            links=rank.place.links,
        )
        with enough_memory(f"rank {number}", comm.clock):
            task.work(job, rank, comm, data, model_file, torch.device("cpu"), store, interruption)

    interruption = VirtualInterruption()
    with interruption.on_signals() if job.save is not None else nullcontext():
        world.run(work)
    return _stopped(job, ranks[0])


def _launch(job: Job) -> str:
    """The command of the first node, or of all."""
    commands = launches(job.world_size, job.plan["command"].get("nodes"))
    return commands[0] if len(commands) == 1 else f"on {len(commands):,} nodes, {commands[0]} and so on"


def _run_this_rank(job: Job, task: Task) -> bool:
    from ..comm.distributed import DistributedComm

    started = world_size()
    if started != job.world_size:
        raise UsageError(
            "P0501",
            f"this package is for {job.world_size} ranks ({job.plan['mesh']}), and was started on {started}",
            f"{_launch(job)}, or train.py --virtual for one process",
            alike=True,
        )
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    place = world()
    number = place.rank
    interruption = None if job.save is None else Interruption(number, place.size)
    clock = Clock()
    with (
        breaking_off() as leaving,
        Caught(checkpoints=job.save is not None) as caught,
        Watchdog(meet(place, job.timeout, caught), place, caught, clock, job.timeout, interruption, leaving) as watch,
        enough_memory(f"rank {number}", clock),
    ):
        store = watch.store
        clock.entering("the choice of its device")
        together = Together(store, number, place.size)
        device = own_device(job.device, together)
        clock.follow(device)
        rank = _load_rank(number, device, job)
        model_file = load_model_file(job.root / "model.py")
        clock.entering("the choice of its checkpoint")
        say = tell if number == 0 else lambda line: None
        if job.save is not None:  # until this process ends: a checkpoint may be on its way until then
            sole(job.save, together, timeout=job.timeout, say=say)
        job = task.prepared(job, together, say)
        if memory := told_of_memory(job):
            say(memory)
        _settle_attention(job, device, say)
        if rank.kernels is not None and device.type == "cuda" and job.tuning:
            clock.entering("the choice of its kernels' configurations")
            settle(rank.kernels, job.root / "kernels", device, together, file=job.tuned, say=say)
        clock.entering("the initialisation of its parameters")
        _materialise(job, model_file, [rank], device, together)
        clock.entering("connecting to its peers")
        comm = DistributedComm(
            rank=number,
            coordinate=rank.place.coordinate,
            groups=rank.place.groups,
            links=rank.place.links,
            stages=rank.place.stages,
            world_size=place.size,
            store=store,
            device=device,
            timeout=datetime.timedelta(seconds=job.timeout),
            clock=clock,
        )
        leaving.append(comm.abort)
        task.work(job, rank, comm, batches_of(job, model_file, say), model_file, device, store, interruption)
        clock.entering("the end of the run")
        comm.barrier()
        comm.disconnect()
    comm.close()
    return _stopped(job, rank)


def _settle_attention(job: Job, device: torch.device, say: Say) -> None:
    attention_kernels.settle(job.attention, attention_kernels.cases(job.plan["attention"], DTYPES), device, say)


def batches_of(job: Job, model_file: ModuleType, say: Say, *, kept: int = 0) -> BatchSource:
    return source(
        model_file,
        job.plan,
        seed=job.seed,
        dtype=job.dtype,
        kept=kept,
        again=job.data_end == "repeat",
        start=job.start * job.accumulate,
        state="" if job.checkpoint is None else job.checkpoint.run.get("position", ""),
        say=say,
        tokens=None if job.data is None else Tokens(job.data, job.data_dtype, job.data_labels, job.shuffles),
    )


def _materialise(
    job: Job, model_file: ModuleType, ranks: Sequence[Rank], device: torch.device, together: Together
) -> None:
    """Give every rank its shards of the initial parameters, or of a checkpoint's."""
    places = [_Places(rank, job.sizes, device) for rank in ranks]
    options = job.plan["options"]
    source = job.checkpoint
    if source is None and job.init is not None:
        source = given(job.init, job.plan, lru_cache(lambda: state_dtypes(model_file, options)), together)
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


class _Places:
    """The places of a rank's parameters by the model's own names; rows of stacks are in one tensor."""

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

    def put(self, name: str, part: Tensor) -> None:
        if name in self._rows:
            self._rows[name].copy_(part)
        else:
            self._parameters[name] = part
        del self.missing[name]


def _train(
    job: Job,
    rank: Rank,
    comm: Comm,
    data: BatchSource,
    model_file: ModuleType,
    device: torch.device,
    store: Store,
    interruption: Interruption | VirtualInterruption | None = None,
) -> None:
    tokens = tokens_per_step(job.plan) * job.accumulate
    times = Times.of(job, comm, rank.number, rank.place.links, rank.place.stages)
    peak = times.peak(job) if job.measures else None
    log = None
    if rank.logs:
        flops = job.plan["flops"] * job.accumulate
        log = StepLog(
            job.metrics,
            job.steps,
            rank=rank.number,
            start=job.start,
            tokens=tokens,
            flops=flops,
            peak=peak,
            board=job.tensorboard,
        )
    place = RankPosition(rank=rank.number, world_size=job.world_size, sizes=job.sizes, coordinate=rank.place.coordinate)
    saver = None
    if job.save is not None:
        saver = Saver(job.save, keep=job.keep, place=place, store=store, attempt=job.attempt, run=job.run)
    clock = comm.clock
    rank.done = job.start
    with torch.no_grad(), recording(job.cuda_graphs, device) as graph, told(), ExitStack() as stack:
        memory = gradient_memory(
            rank.shards, rank.parameters, rank.stage_classes.values(), job.sizes, compiled=rank.compiled
        )
        own = ModelView(rank.shards, job.sizes, rank.place.coordinate)
        parameters, trained = own.tensors(rank.parameters), own.tensors(memory.gradients)
        optimizer, scaled = updating(
            job.recipe.all_settings(job.dims),
            parameters,
            trained,
            {tuple(own.names(names)): buffer for names, buffer in memory.buffers.items()},
            rank.kernels,
            shards=own.shards,
            comm=comm,
            sizes=job.sizes,
            lr=job.lr,
            graphs=job.cuda_graphs,
        )
        rank.parameters.update(own.joined(parameters, rank.parameters))
        stages = make_stages(rank.stage_classes, comm, rank.parameters, memory)
        if optimizer is not None:
            write_casts(optimizer, stages.values())
        scale = LossScale() if job.plan["precision"] == "fp16" else None
        held = {name: (shard, parameters[name]) for name, shard in own.shards.items()}
        optimized = {name: held[name] for name in trained}
        if job.checkpoint is not None:
            if optimizer is not None:
                restore_optimizer(optimizer, optimized, job.checkpoint, job.sizes, rank.place.coordinate)
            if scale is not None:
                restore_scale(scale, job.checkpoint)
            if (
                not restore_left_out(stages, job.checkpoint, job.sizes, rank.place.coordinate, device)
                and rank.number == 0
            ):
                tell(
                    "what compressed sums of gradients had left out is dropped: it is of another mesh, or of other sums"
                )
            job.checkpoint.close()

        def kept() -> dict[str, Held]:
            saved = state(held, optimized, optimizer, job.plan, scale)
            return saved | left_out(stages, job.sizes, rank.place.coordinate)

        update = Update(
            optimizer,
            scaled,
            {name: own.shards[name] for name in trained if name not in job.balance},
            comm,
            job.sizes,
            Rate(base=job.lr, warmup=job.warmup, decline=job.lr_schedule, least=job.min_lr, steps=job.steps),
            clip=job.clip,
            scale=scale,
            norms=job.measures,
        )
        clock.entering("setup")
        routers = (decoded(PlanRouter, each) for each in job.plan.get("routers", ()))
        comm.loads.expect(routers, stages, device, counted=job.measures or job.report is not None)
        comm.expect(job.plan["draws"], job.plan["microbatches"] if job.plan["repeated"] else 1)
        for stage in stages.values():
            stage.setup()

        def part_of(number: int) -> Mapping[str, Tensor]:
            return data.part(number, rank.inputs, job.sizes, rank.place.coordinate)

        def save(done: int) -> None:
            assert saver is not None
            saver.save(done, kept(), position=data.position(done * job.accumulate - 1))

        ahead = int(device.type == "cuda") if job.prefetch is None else job.prefetch
        steps = Steps(
            job=job,
            comm=comm,
            coordinate=rank.place.coordinate,
            device=device,
            stages=stages,
            actions=rank.actions,
            told=rank.told,
            inputs=rank.inputs,
            parameters=rank.parameters,
            gradients=memory.gradients,
            scaled=scaled,
            update=update,
            scale=scale,
            part_of=Feed(part_of, end=job.steps * job.accumulate, ahead=ahead, pin=device.type == "cuda"),
            settle=saver.wait if saver is not None else lambda: None,
            graph=graph,
        )
        evaluation = Evaluation(
            job=job,
            model_file=model_file,
            place=rank.place,
            comm=comm,
            device=device,
            parameters=rank.parameters,
        )
        collect = stack.enter_context(collected()) if not job.virtual else lambda done: None
        times.begin(job.start)
        measuring = 0.0  # seconds between two steps, which the next one's throughput has to bear
        for step in range(job.start, job.steps):
            if interruption is not None and interruption.before(step):
                break
            done = steps.run(step)
            if saver is not None and saver.behind(step + 1, job.save_slack):
                clock.entering("the writing of a checkpoint")
                saver.settle(comm.barrier)
            seconds, aside = done.seconds + measuring, {"data": done.data, "measuring": measuring}
            rank.seconds.append(seconds)
            begun = time.perf_counter()
            split = times.end(step)
            evaluated = evaluation.run() if evaluation.due(step + 1) else None
            if log is not None and done.loss is not None:
                rank.losses.append(done.loss)
                log.step(
                    step, done.loss, seconds, done.updated, peak_bytes(device), split, aside, evaluated, done.loads
                )
            collect(step + 1)
            measuring = time.perf_counter() - begun
            if job.record:
                recorded = done.recorded | {f"parameter/{name}": x for name, x in parameters.items()}
                with writing(job.record, rank.number):
                    job.record.mkdir(parents=True, exist_ok=True)
                    save_tensors(job.record / f"step_{step + 1:04d}_rank_{rank.number:03d}.safetensors", recorded)
            rank.done = step + 1
            if saver is not None and job.saves_after(step + 1):
                clock.entering("saving")
                save(step + 1)
    times.close()
    if saver is not None and rank.done not in (saver.saved, job.start):
        save(rank.done)
    if saver is not None:
        clock.entering("the writing of the last checkpoint")
        saver.wait()
    if log is not None:
        log.close()
    if job.report:
        with writing(job.report, rank.number):
            _write_report(job, job.report, rank, device, comm.loads.rows)


def _stopped(job: Job, rank: Rank) -> bool:
    """Whether the run was interrupted; reports it once everything is saved."""
    stopped = rank.done < job.steps and job.start < job.steps
    if stopped and rank.number == 0:
        what = f"what was done is saved in {job.save}, and --resume continues" if rank.done else "nothing was done yet"
        tell(f"interrupted after step {rank.done}: {what}")
    return stopped


def _write_report(job: Job, folder: Path, rank: Rank, device: torch.device, rows: Mapping[str, Sequence[int]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        "rank": rank.number,
        "peak_bytes": peak_bytes(device),
        "step_seconds": rank.seconds,
        "batches_per_step": job.accumulate,
        "losses": rank.losses,
        "logs": rank.logs,
        **({"expert_rows": rows} if rows else {}),
    }
    write_whole(folder / f"rank_{rank.number:03d}.json", json.dumps(report))
