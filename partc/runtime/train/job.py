"""A run of a package: its command line, and the options that a checkpoint provides."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..checkpoint.given_parameters import under_plan_names
from ..checkpoint.manifest import checkpoints, read, states_in, step_of
from ..checkpoint.restore import Checkpoint, Say, newest
from ..documents import Malformed, decoded, parsed, regular
from ..errors import UsageError
from ..layout import parse_mesh
from ..optimizer import recipe as recipes
from ..optimizer.recipe import Recipe
from ..optimizer.update import Decline
from ..processes.agreement import Together
from ..processes.devices import Wanted
from .precision import held_in
from .tokens import check_file

SAVE_EVERY, KEEP = 100, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The settings of a run, equal on every rank."""

    root: Path
    plan: dict[str, Any]
    steps: int
    optimizer: str
    lr: float
    seed: int
    virtual: bool
    device: Wanted
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
    group: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)  # the optimizer's options from the command line
    save: Path | None = None
    save_every: int = SAVE_EVERY
    save_slack: int = 0
    prefetch: int | None = None
    keep: int = KEEP
    resume: Path | None = None
    init: Path | None = None
    data: str | None = None
    data_dtype: str | None = None
    data_labels: str | None = None
    data_end: str = "repeat"
    eval_every: int = 0
    eval_batches: int = 1
    eval_data: str | None = None
    exit_code: int = 0
    check_nans: bool = False
    tuning: bool = True
    tuned: Path | None = None
    cuda_graphs: bool = False
    attention: str = "auto"
    deterministic: bool = False
    given: frozenset[str] = frozenset()  # the options in `CONTINUED` that are on the command line
    checkpoint: Checkpoint | None = None  # found by `resume`
    attempt: str = ""  # a name for this run, if it saves checkpoints

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
        """The dtype of the batch and of the optimizer's copy of parameters."""
        return held_in(self.plan["precision"])

    @property
    def recipe(self) -> Recipe:
        """The updates of all parameters. Raises UsageError P0551."""
        return Recipe.of(
            self.optimizer,
            weight_decay=self.weight_decay,
            groups=self.group,
            no_decay=self.no_decay,
            balance=self.balance,
        )

    @property
    def balance(self) -> dict[str, float]:
        """Map routers' biases, whose gradients are loads of experts, to the sizes of their updates."""
        parameters = self.plan["parameters"]
        return {name: entry["balance"] for name, entry in parameters.items() if "balance" in entry}

    @property
    def dims(self) -> dict[str, int]:
        """The number of dimensions of each trained parameter."""
        return {name: len(entry["shape"]) for name, entry in self.plan["parameters"].items() if entry["trainable"]}

    @property
    def shuffles(self) -> bool:
        """Whether a token file's rows are read in an order that follows from the seed."""
        return True

    @property
    def measures(self) -> bool:
        """Whether the times of a step's parts are needed."""
        return self.metrics is not None or self.tensorboard is not None

    @property
    def start(self) -> int:
        """The number of steps before this run."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def run(self) -> dict[str, Any]:
        """The description of the training for a checkpoint; a continued run inherits the entries in `CONTINUED`."""
        kept = {name: self.plan.get(name) for name in ("name", "mesh", "microbatches", "precision", "options")}
        kept |= {"init": self._origin, "states": self.recipe.states(self.dims)}
        return kept | {name: getattr(self, name) for name in CONTINUED}

    @property
    def _origin(self) -> str | None:
        """The file of initial parameters, if there is one."""
        if self.checkpoint is not None:
            return self.checkpoint.run.get("init")
        return None if self.init is None else str(self.init.resolve())

    def saves_after(self, step: int) -> bool:
        return self.save is not None and (step % self.save_every == 0 or step == self.steps)


# Options that are fixed at the start of a training; a continued one keeps them unless they are given again.
DEFAULTS: dict[str, Any] = {
    "optimizer": "adamw", "lr": 1e-3, "accumulate": 1, "clip": None, "lr_schedule": "constant", "warmup": 0,
    "min_lr": 0.0, "weight_decay": None, "no_decay": (), "group": (), "data": None,
    "data_dtype": None, "data_labels": None,
}  # fmt: skip
CONTINUED = ("seed", *DEFAULTS)


def told_of_memory(job: Job) -> str:
    """A message if the run's optimizer keeps other tensors than the one in the memory account; else ''."""
    command = job.plan.get("command", {})
    optimizer = command.get("optimizer", recipes.DEFAULT)
    compiled = Recipe.of(optimizer, groups=command.get("group", ()), balance=job.balance)
    if compiled.states(job.dims) == job.recipe.states(job.dims):
        return ""
    return f"the memory account in plan.json is for {compiled}: this run's optimizer is {job.optimizer}"


def with_options(job: Job, before: str = "") -> Job:
    """The job with the options of its optimizer checked; `before` is the optimizer of the checkpoint.

    Raises UsageError P0521, P0533 and P0551.
    """
    text = job.optimizer
    if before and recipes.parse_recipe(before)[0] == recipes.parse_recipe(text)[0]:
        text = recipes.merged_recipe(before, recipes.parse_recipe(text)[1])
    job = dataclasses.replace(job, optimizer=recipes.merged_recipe(text, job.options), options={})
    if job.min_lr > job.lr:
        raise contradiction(f"--min-lr {job.min_lr:g} is more than --lr {job.lr:g}", "--min-lr")
    if job.min_lr and "min_lr" in job.given and job.lr_schedule == "constant":
        raise contradiction("--min-lr is the end of a schedule that falls, and this one is constant", "--min-lr")
    for name in ("data_dtype", "data_labels"):
        if name in job.given and job.data is None and job.eval_data is None:
            raise contradiction(f"{option(name)} has no effect without --data", option(name))
    shapes = {name: len(entry["shape"]) for name, entry in job.plan["parameters"].items()}
    job.recipe.check(shapes)
    for name, settings in job.recipe.all_settings(job.dims).items():
        if job.cuda_graphs and not settings.kind.fused:
            why = f"the update of {name} by {settings.name} takes numbers from the host"
            raise uncaptured_refusal(why, "add --no-cuda-graphs, or choose adam, adamw or sgd")
    return job


def check_places(job: Job) -> None:
    """Check that a run on this machine can read and write the files named in its options.

    Raises UsageError P0521, P0523, P0526, P0527, P0538 and P0545.
    """
    for file in filter(None, (job.data, job.eval_data)):
        try:
            check_file(Path(file), job.data_dtype, job.plan, job.data_labels)
        except UsageError as error:
            raise UsageError(error.code, error.cause, error.help, alike=True) from error
    resume = job.resume
    if resume is not None and resume != job.save and not (resume.is_dir() if step_of(resume) else checkpoints(resume)):
        cause = f"nothing to resume from in {resume}: {'it has' if resume.is_dir() else 'there are'} no checkpoints"
        help = "name the folder that --save was given, or one of its step_ folders"
        raise UsageError("P0523", cause, help, alike=True)
    if job.init is not None and resume is None:
        with suppress(_Undecided):
            try:
                under_plan_names(job.init, job.plan, _undecided)
            except UsageError as error:
                raise UsageError(error.code, error.cause, error.help, alike=True) from error
    folders = {"save": job.save, "trace": job.trace, "record": job.record, "report": job.report}
    places = {name: (folder, folder) for name, folder in {**folders, "tensorboard": job.tensorboard}.items() if folder}
    if job.metrics is not None:
        places["metrics"] = job.metrics, job.metrics.parent
    users: dict[Path, str] = {}
    for name, (path, folder) in places.items():
        user = users.setdefault(path.absolute(), name)
        if user != name:
            raise contradiction(f"{option(user)} and {option(name)} both name {path}", option(name))
        why = _why_not(name, path, folder)
        if why:
            raise UsageError("P0526" if name == "save" else "P0538", why, _ROOM, alike=True)


class _Undecided(Exception):
    """The plan does not determine whether parameters fit; the model file has to be loaded."""


def _undecided() -> NoReturn:
    raise _Undecided


_ROOM = "name a place with room that all ranks can write to"


def _why_not(name: str, path: Path, folder: Path) -> str:
    """The reason why `path`, which is `folder` or a file in it, cannot be written; '' if it can. New folders are
    created later.
    """
    why = ""
    try:
        if path.is_symlink() and not path.exists():
            why = "it is a link that leads nowhere"
        elif path != folder and path.is_dir():
            why = "it is a folder"
        elif path != folder and not folder.is_dir():
            why = f"there is no folder {folder}"
        elif path == folder or not path.exists():
            nearest = next(each for each in (folder, *folder.absolute().parents) if each.exists())
            tempfile.TemporaryFile(dir=nearest).close()
        elif path.is_file():
            path.open("ab").close()
            if not _is_log(path):
                why = "no run wrote it, and a run replaces it"
        elif not os.access(path, os.W_OK):
            why = "it is read-only"
    except OSError as error:
        why = error.strerror or str(error)
    return f"{path}, which --{name} names, cannot be written: {why}" if why else ""


def _is_log(path: Path) -> bool:
    """Whether a file is empty, or starts like a run's metrics."""
    with regular(path) as file:
        line = file.readline(1 << 20)
    try:
        return not line or "step" in decoded(dict[str, Any], parsed(line))
    except Malformed:
        return False


def uncaptured_refusal(cause: str, help: str) -> UsageError:
    return UsageError("P0533", f"a step cannot be recorded as CUDA graphs: {cause}", help, alike=True)


def contradiction(cause: str, option: str) -> UsageError:
    return UsageError("P0521", cause, f"leave out {option}, or correct it", alike=True)


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def prepared(job: Job, together: Together, say: Say) -> Job:
    """The job with the checkpoint that it continues, after all ranks have agreed. Raises UsageError P0522 to P0525."""
    if job.resume is not None:
        checkpoint = newest(job.resume, together, needed=job.resume != job.save, say=say)
        if checkpoint is None:
            say(f"{job.resume} has no checkpoint yet: starting at the beginning")
            job = with_options(job)
        else:
            checkpoint.check_fits(job.plan)
            say(f"continuing from {checkpoint.path}, after step {checkpoint.step}")
            job = dataclasses.replace(job, checkpoint=checkpoint, **_continued(job, checkpoint))
            job = with_options(job, checkpoint.run["optimizer"])
            _check_states(job, checkpoint)
            if checkpoint.step >= job.steps:
                say(f"nothing is left to do: --steps {job.steps} counts those that were done before")
    if job.save is not None:
        attempt, _, problem = together.broadcast(f"{uuid.uuid4().hex[:8]} {_occupied(job, job.save)}").partition(" ")
        if problem:
            raise UsageError("P0522", problem, "continue it with --resume, or save in another folder", alike=True)
        job = dataclasses.replace(job, attempt=attempt)
    return job


def _continued(job: Job, checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's settings for options that the command line omits; the learning rate may change."""
    for name in ("seed", "accumulate"):  # the batches of a step depend on these
        if name in job.given and getattr(job, name) != checkpoint.run[name]:
            raise UsageError(
                "P0521",
                f"--{name} is {getattr(job, name)}, the checkpoint was made with {checkpoint.run[name]}",
                f"leave out --{name}",
                alike=True,
            )
    return {name: checkpoint.run.get(name, DEFAULTS.get(name)) for name in CONTINUED if name not in job.given}


def _check_states(job: Job, checkpoint: Checkpoint) -> None:
    """Raise UsageError P0521 if the tensors that the optimizer keeps are not those in the checkpoint."""
    mine, theirs = job.recipe.states(job.dims), sorted(map(list, states_in(checkpoint.run)))
    if recipes.parse_recipe(job.optimizer)[0] != recipes.parse_recipe(checkpoint.run["optimizer"])[0] or mine != theirs:
        raise UsageError(
            "P0521",
            f"the optimizer is {job.optimizer}, the checkpoint was made with {checkpoint.run['optimizer']}",
            "leave out --optimizer, and options that change which tensors it keeps",
            alike=True,
        )


def _occupied(job: Job, folder: Path) -> str:
    """The reason why this run must not save in a folder (it has later checkpoints, or another run's); '' if it may."""
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
