"""The entry of the package's train.py: runs one rank of many, or all ranks in one process."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from ..checkpoint.restore import Say
from ..clock import Clock
from ..device.cuda_graphs import need_gpus
from ..device.determinism import deterministic
from ..device.host_memory import keep_freed_memory
from ..errors import UsageError, enough_memory, tell
from ..layout import DTYPES
from ..ops import attention_kernels
from ..plan import launches
from ..processes.agreement import Together
from ..processes.devices import own_device, shared_device
from ..processes.interruption import Interruption, VirtualInterruption
from ..processes.ownership import claim_folder
from ..processes.rendezvous import common_store, world, world_size
from ..processes.signals import Caught, unblock_signals
from ..processes.watchdog import Watchdog, breaking_off
from ..refusal import Refusal
from ..torch_private import lone_store
from .command_line import parse
from .data import BatchSource, Tokens, load_model_file, source
from .job import Job, check_places, prepared, told_of_memory
from .rank import Rank, load_rank, materialise
from .training import train
from .tuning import configure_kernels


@dataclass(frozen=True, slots=True)
class Task:
    """A task of all ranks: they agree on a job, then each rank does its work."""

    prepared: Callable[[Job, Together, Say], Job]
    work: Callable[..., None]


def main(argv: Sequence[str], root: Path) -> int:
    """Train the package in `root`. Returns the exit code."""
    return run(lambda: parse(argv, root), Task(prepared, train))


def run(job_of: Callable[[], Job], task: Task) -> int:
    """Do a task on all ranks, or on this rank under torchrun. Returns the exit code."""
    report: Path | None = None
    try:
        job = job_of()
        report = job.report
        # Whether all ranks are on this machine.
        here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        if job.virtual or here:
            check_places(job)
        keep_freed_memory()
        with enough_memory("this process", Clock()), deterministic(job.deterministic), ExitStack() as stack:
            stopped = _run_virtual(job, stack, task) if job.virtual else run_this_rank(job, task)
    except UsageError as error:
        if not error.alike or os.environ.get("RANK", "0") == "0":
            tell(str(error))
            if report is not None and error.exit_code == 2:
                _report_refusal(report, error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return job.exit_code if stopped else 0


def _report_refusal(folder: Path, error: UsageError) -> None:
    with suppress(OSError):
        Refusal(code=error.code, cause=error.cause, help=error.help).write(folder)


def _run_virtual(job: Job, stack: ExitStack, task: Task) -> bool:
    from ..comm.virtual import VirtualComm, World

    unblock_signals()
    store = lone_store()
    together = Together(store, 0, 1)
    if job.save is not None:
        stack.callback(claim_folder(job.save, together, timeout=job.timeout, say=tell))
    job = task.prepared(job, together, tell)
    if memory := told_of_memory(job):
        tell(memory)
    device = shared_device(job.device)
    need_gpus(not job.cuda_graphs)
    _enable_attention_kernels(job, device, tell)
    world = World(job.world_size)
    ranks = [load_rank(number, device, job) for number in range(job.world_size)]
    _configure_kernels(job, ranks[0], device, together, tell)
    model_file = load_model_file(job.root / "model.py")
    materialise(job, model_file, ranks, device, together)
    data = batches_of(job, model_file, tell, kept=2)  # no rank is more than one batch behind another

    def work(number: int) -> None:
        rank = ranks[number]
        comm = VirtualComm(
            world=world,
            rank=number,
            coordinate=rank.place.coordinate,
            groups=rank.place.groups,
            links=rank.place.links,
            device=device,
        )
        with enough_memory(f"rank {number}", comm.clock):
            task.work(job, rank, comm, data, model_file, device, store, interruption)

    interruption = VirtualInterruption()
    with interruption.on_signals() if job.save is not None else nullcontext():
        world.run(work)
    return _stopped(job, ranks[0])


def _launch(job: Job) -> str:
    """The launch command, of the first node if there are several."""
    commands = launches(job.world_size, job.plan["command"].get("nodes"))
    return commands[0] if len(commands) == 1 else f"on {len(commands):,} nodes, {commands[0]} and so on"


def run_this_rank(job: Job, task: Task) -> bool:
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
        Watchdog(
            common_store(place, job.timeout, caught), place, caught, clock, job.timeout, interruption, leaving
        ) as watch,
        enough_memory(f"rank {number}", clock),
    ):
        store = watch.store
        clock.entering("the choice of its device")
        together = Together(store, number, place.size)
        device = own_device(job.device, together)
        clock.follow(device)
        rank = load_rank(number, device, job)
        model_file = load_model_file(job.root / "model.py")
        clock.entering("the choice of its checkpoint")
        say = tell if number == 0 else lambda line: None
        if job.save is not None:  # held until this process ends, since a checkpoint may be in progress until then
            claim_folder(job.save, together, timeout=job.timeout, say=say)
        job = task.prepared(job, together, say)
        if memory := told_of_memory(job):
            say(memory)
        _enable_attention_kernels(job, device, say)
        clock.entering("the choice of its kernels' configurations")
        _configure_kernels(job, rank, device, together, say)
        clock.entering("the initialisation of its parameters")
        materialise(job, model_file, [rank], device, together)
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


def _enable_attention_kernels(job: Job, device: torch.device, say: Say) -> None:
    attention_kernels.enable_kernels(job.attention, attention_kernels.cases(job.plan["attention"], DTYPES), device, say)


def _configure_kernels(job: Job, rank: Rank, device: torch.device, together: Together, say: Say) -> None:
    """Configure the package's kernels on a GPU, unless the job keeps their own configurations."""
    if rank.kernels is not None and device.type == "cuda" and job.tuning:
        configure_kernels(rank.kernels, job.root / "kernels", device, together, file=job.tuned, say=say)


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


def _stopped(job: Job, rank: Rank) -> bool:
    """Whether the run was interrupted; reports it once everything is saved."""
    stopped = rank.done < job.steps and job.start < job.steps
    if stopped and rank.number == 0:
        what = f"progress is saved in {job.save}; continue with --resume" if rank.done else "nothing was done yet"
        tell(f"interrupted after step {rank.done}: {what}")
    return stopped
