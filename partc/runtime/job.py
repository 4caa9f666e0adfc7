"""What a run of a package does: its command line, and what of it comes from the checkpoint that it continues."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from .errors import UsageError
from .layout import parse_mesh
from .manifest import checkpoints, read
from .precision import held_in
from .restore import Checkpoint, Say, newest
from .together import Together
from .tuning import given
from .update import Decline

SAVE_EVERY, KEEP = 100, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a run does, the same on every rank."""

    root: Path
    plan: dict[str, Any]
    steps: int
    optimizer: str
    lr: float
    seed: int
    virtual: bool
    record: Path | None
    report: Path | None
    metrics: Path | None
    timeout: float
    tensorboard: Path | None = None
    peak_flops: float | None = None
    trace: Path | None = None
    trace_steps: str | None = None
    accumulate: int = 1
    clip: float | None = None
    lr_schedule: Decline = "constant"
    warmup: int = 0
    min_lr: float = 0.0
    weight_decay: float | None = None
    no_decay: tuple[str, ...] = ()
    save: Path | None = None
    save_every: int = SAVE_EVERY
    save_slack: int = 0
    keep: int = KEEP
    resume: Path | None = None
    init: Path | None = None
    exit_code: int = 0
    check_nans: bool = False
    tuning: bool = True
    tuned: Path | None = None
    cuda_graphs: bool = False
    given: frozenset[str] = frozenset()  # of `_CONTINUED`, what the command line says
    checkpoint: Checkpoint | None = None  # which `resume` has found
    attempt: str = ""  # names this run, if it saves

    @property
    def sizes(self) -> dict[str, int]:
        return parse_mesh(self.plan["mesh"])

    @property
    def world_size(self) -> int:
        size = 1
        for ways in self.sizes.values():
            size *= ways
        return size

    @property
    def dtype(self) -> torch.dtype:
        """Of the batch, and of what the optimizer holds."""
        return held_in(self.plan["precision"])

    @property
    def measures(self) -> bool:
        """Whether anybody wants to know where a step's time goes."""
        return self.metrics is not None or self.tensorboard is not None

    @property
    def start(self) -> int:
        """Steps that were done before this run."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def run(self) -> dict[str, Any]:
        """What a checkpoint says of the training: those of `_CONTINUED` hold for its continuation too."""
        kept = {name: self.plan.get(name) for name in ("name", "mesh", "microbatches", "precision", "options")}
        return kept | {"init": self._origin} | {name: getattr(self, name) for name in _CONTINUED}

    @property
    def _origin(self) -> str | None:
        """The file that the training started from, if any."""
        if self.checkpoint is not None:
            return self.checkpoint.run.get("init")
        return None if self.init is None else str(self.init.resolve())

    def saves_after(self, step: int) -> bool:
        return self.save is not None and (step % self.save_every == 0 or step == self.steps)


# Decided when a training starts; a continued one keeps them, unless it says otherwise.
_DEFAULTS: dict[str, Any] = {
    "optimizer": "adamw", "lr": 1e-3, "accumulate": 1, "clip": None, "lr_schedule": "constant", "warmup": 0,
    "min_lr": 0.0, "weight_decay": None, "no_decay": (),
}  # fmt: skip
_CONTINUED = ("seed", *_DEFAULTS)
_LEAST = {"save_every": 1, "save_slack": 0, "keep": 1, "accumulate": 1, "warmup": 0, "min_lr": 0, "weight_decay": 0}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError("P0535", message, "train.py --help lists its options", alike=True)


def parse(argv: Sequence[str], root: Path) -> Job:
    """Read the command line of train.py. Raises UsageError P0503, P0521, P0532 P0533 and P0535."""
    parser = _Parser(prog="train.py", description="Train this package; one process per rank, under torchrun.")
    add = parser.add_argument
    add("--steps", type=int, default=10, help="of the whole training, with those before --resume")
    add("--optimizer", choices=("adamw", "sgd"), help="adamw by default, or the checkpoint's")
    add("--lr", type=float, help="1e-3 by default, or the checkpoint's")
    add("--lr-schedule", choices=("constant", "linear", "cosine"), help="what follows the warm-up; constant")
    add("--warmup", type=int, metavar="N", help="steps in which the learning rate rises to --lr; 0")
    add("--min-lr", type=float, metavar="LR", help="the learning rate of the last step, linear or cosine; 0")
    add("--clip", type=float, metavar="NORM", help="scale gradients down to this norm over the whole model")
    add("--weight-decay", type=float, metavar="X", help="the optimizer's own by default")
    add("--no-decay", action="append", metavar="GLOB", help="parameters without weight decay: '*.bias', '*norm*'")
    add("--accumulate", type=int, metavar="N", help="batches of data for each step of the optimizer; 1")
    add("--seed", type=int, help="of the initial parameters and the data; the plan's by default")
    add(
        "--init",
        type=Path,
        metavar="FILE",
        help="start from a state dict: safetensors, their index, or a Hugging Face folder; --resume goes first",
    )
    add("--virtual", action="store_true", help="all ranks in this one process")
    add(
        "--metrics",
        type=Path,
        metavar="FILE",
        help="one line of JSON per step: loss, rate, seconds and where they go, mfu",
    )
    add("--tensorboard", type=Path, metavar="DIR", help="the same for TensorBoard, which must be installed")
    add("--peak-flops", type=float, metavar="X", help="a second and rank, for mfu; known GPUs' or measured by default")
    add("--trace", type=Path, metavar="DIR", help="what each rank does when, of some steps, for partc trace DIR")
    add("--trace-steps", metavar="FIRST:LAST", help="those to trace; by default three after the first")
    add("--record", type=Path, metavar="DIR", help="every step's gradients and parameters, per rank")
    add("--report", type=Path, metavar="DIR", help="losses, times and memory, per rank, as JSON")
    add("--timeout", type=float, default=600.0, help="seconds that a rank waits for another")
    add("--save", type=Path, metavar="DIR", help="write checkpoints into this folder, which all ranks share")
    slack = "steps to go on while a checkpoint is being written; if a rank dies then, they are lost too; 0"
    add("--save-slack", type=int, default=0, metavar="N", help=slack)
    add("--save-every", type=int, default=SAVE_EVERY, metavar="N", help=f"steps, and at the end; {SAVE_EVERY}")
    add("--keep", type=int, default=KEEP, metavar="K", help=f"only the newest K checkpoints; {KEEP}")
    add(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR",
        help="continue from the newest whole checkpoint in DIR (--save's by default, where there may be none yet), "
        "or from DIR/step_...; of any mesh",
    )
    add("--exit-code", type=int, default=0, metavar="N", help="after stopping on SIGTERM or SIGUSR1, with --save; 0")
    add("--check-nans", action="store_true", help="stop where the loss is not finite, and say which region made it so")
    add(
        "--tuned",
        type=Path,
        metavar="FILE",
        help="configurations of kernels for GPUs; by default the first run times some, for kernels/tuned.json",
    )
    add(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        help="record what the GPU does in a step, and repeat that: no launches from Python; as compiled by default",
    )
    add("--no-tuning", dest="tuning", action="store_false", help="have kernels keep the package's configurations")
    arguments = vars(parser.parse_args(argv))
    plan_file = root / "plan.json"
    if not plan_file.is_file():
        raise UsageError("P0503", f"{root} has no plan.json", "run train.py from the folder that partc compile wrote")
    for name, least in _LEAST.items():
        if arguments[name] is not None and not arguments[name] >= least:
            raise _out_of_range(name, arguments[name], f"{least} or more")
    for name in ("clip", "peak_flops"):
        if arguments[name] is not None and not arguments[name] > 0:
            raise _out_of_range(name, arguments[name], "more than 0")
    if arguments["trace_steps"] is not None and arguments["trace"] is None:
        raise UsageError("P0521", "--trace-steps has no --trace", "name a folder: --trace DIR", alike=True)
    if arguments["tensorboard"] is not None and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("P0529", "TensorBoard is not installed", "pip install tensorboard", alike=True)
    if (root / "kernels").is_dir() and importlib.util.find_spec("triton") is None:
        help = "pip install triton, or compile with --kernels aten"
        raise UsageError("P0531", "the package's kernels need Triton, which is not installed", help, alike=True)
    if arguments["tuned"] is not None:
        given(arguments["tuned"])
    resume = arguments.pop("resume")
    if resume == "" and arguments["save"] is None:
        raise UsageError("P0521", "--resume has no folder", "name one, or add --save DIR to continue there", alike=True)
    plan = json.loads(plan_file.read_text())
    if arguments["cuda_graphs"] is None:
        arguments["cuda_graphs"] = plan.get("command", {}).get("cuda_graphs", False)
    if arguments["cuda_graphs"]:
        _check_graphs(arguments, plan)
    named = frozenset(name for name in _CONTINUED if arguments[name] is not None)
    for name, value in {"seed": plan["seed"], **_DEFAULTS}.items():
        if name not in named:
            arguments[name] = value
    folder = None if resume is None else Path(resume) if resume else arguments["save"]
    return Job(root=root, plan=plan, resume=folder, given=named, **arguments)


def _check_graphs(arguments: dict[str, Any], plan: dict[str, Any]) -> None:
    """Raises UsageError P0533 where the host has a part in a step."""
    if "uncaptured" in plan:
        raise _uncaptured(plan["uncaptured"], "leave out --cuda-graphs, or add --no-cuda-graphs")
    for name, why in (
        ("check_nans", "stops in the middle of a step"),
        ("trace", "asks in the middle of a step what time it is"),
    ):
        if arguments[name]:
            option = f"--{name.replace('_', '-')}"
            raise _uncaptured(f"{option} {why}", f"leave out {option}, or add --no-cuda-graphs")


def _uncaptured(cause: str, help: str) -> UsageError:
    return UsageError("P0533", f"a step cannot be recorded as CUDA graphs: {cause}", help, alike=True)


def _out_of_range(name: str, value: float, allowed: str) -> UsageError:
    option = f"--{name.replace('_', '-')}"
    return UsageError("P0521", f"{option} {value} is out of range", f"give {allowed}", alike=True)


def prepared(job: Job, together: Together, say: Say) -> Job:
    """The job with the checkpoint that it continues, once all ranks agree. Raises UsageError P0522 to P0525."""
    if job.resume is not None:
        checkpoint = newest(job.resume, together, needed=job.resume != job.save, say=say)
        if checkpoint is None:
            say(f"{job.resume} has no checkpoint yet: starting at the beginning")
        else:
            checkpoint.check_fits(job.plan)
            say(f"continuing from {checkpoint.path}, after step {checkpoint.step}")
            job = dataclasses.replace(job, checkpoint=checkpoint, **_continued(job, checkpoint))
            if checkpoint.step >= job.steps:
                say(f"nothing is left to do: --steps {job.steps} counts those that were done before")
    if job.save is not None:
        attempt, _, problem = together.told(f"{uuid.uuid4().hex[:8]} {_occupied(job, job.save)}").partition(" ")
        if problem:
            raise UsageError("P0522", problem, "continue it with --resume, or save in another folder", alike=True)
        job = dataclasses.replace(job, attempt=attempt)
    return job


def _continued(job: Job, checkpoint: Checkpoint) -> dict[str, Any]:
    """What the checkpoint says where the command line doesn't; the learning rate may change on the way."""
    for name in ("seed", "optimizer", "accumulate"):  # a step's batches follow from its number and theirs
        if name in job.given and getattr(job, name) != checkpoint.run[name]:
            raise UsageError(
                "P0521",
                f"--{name} is {getattr(job, name)}, the checkpoint was made with {checkpoint.run[name]}",
                f"leave out --{name}",
                alike=True,
            )
    return {name: checkpoint.run.get(name, _DEFAULTS.get(name)) for name in _CONTINUED if name not in job.given}


def _occupied(job: Job, folder: Path) -> str:
    """Why this run must not save in a folder: it has another run's checkpoints, or later ones than its start."""
    own = job.checkpoint is not None and folder.resolve() == job.checkpoint.path.resolve().parent
    for path in checkpoints(folder):
        if own and job.checkpoint is not None and path.name in job.checkpoint.passed_over:
            continue
        try:
            step = read(path).step
        except UsageError:
            continue
        if not own or step > job.start:
            return f"{path} is there, and this run starts {f'after step {job.start}' if job.start else 'anew'}"
    return ""
