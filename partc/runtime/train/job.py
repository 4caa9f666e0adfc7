"""A run of a package: its command line, and the options that a checkpoint provides."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from .. import plan as plans
from ..checkpoint.given_parameters import fitting
from ..checkpoint.manifest import checkpoints, read, states_in, step_of
from ..checkpoint.restore import Checkpoint, Say, newest
from ..documents import Malformed, decoded, parsed, path_of, regular
from ..errors import UsageError
from ..layout import parse_mesh
from ..ops import attention_kernels
from ..optimizer import recipe as recipes
from ..optimizer.kinds import KINDS
from ..optimizer.recipe import Recipe, spared
from ..optimizer.update import Decline
from ..processes.agreement import Together
from ..processes.devices import WANTED, Wanted
from .precision import held_in
from .tokens import DTYPES as TOKENS
from .tokens import check_file
from .trace import wanted_steps
from .tuning import given

SAVE_EVERY, KEEP = 100, 3
_OPTION = "option_"  # prefix of arguments that are options of an optimizer


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
    options: Mapping[str, str] = field(default_factory=dict)  # the optimizer's, as the command line gives them
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
    given: frozenset[str] = frozenset()  # the options in `_CONTINUED` that the command line gives
    checkpoint: Checkpoint | None = None  # found by `resume`
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
        """The sizes of the updates of routers' biases, whose gradients are loads of experts."""
        parameters = self.plan["parameters"]
        return {name: entry["balance"] for name, entry in parameters.items() if "balance" in entry}

    @property
    def dims(self) -> dict[str, int]:
        """The numbers of dimensions of trained parameters."""
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
        """The training's description in a checkpoint; a continuation inherits the entries in `_CONTINUED`."""
        kept = {name: self.plan.get(name) for name in ("name", "mesh", "microbatches", "precision", "options")}
        kept |= {"init": self._origin, "states": self.recipe.states(self.dims)}
        return kept | {name: getattr(self, name) for name in _CONTINUED}

    @property
    def _origin(self) -> str | None:
        """The file that the training started from, if any."""
        if self.checkpoint is not None:
            return self.checkpoint.run.get("init")
        return None if self.init is None else str(self.init.resolve())

    def saves_after(self, step: int) -> bool:
        return self.save is not None and (step % self.save_every == 0 or step == self.steps)


# Decided at the start of a training; a continued one keeps them unless given again.
_DEFAULTS: dict[str, Any] = {
    "optimizer": "adamw", "lr": 1e-3, "accumulate": 1, "clip": None, "lr_schedule": "constant", "warmup": 0,
    "min_lr": 0.0, "weight_decay": None, "no_decay": (), "group": (), "data": None,
    "data_dtype": None, "data_labels": None,
}  # fmt: skip
_CONTINUED = ("seed", *_DEFAULTS)

# Options that another one gives a meaning, with their defaults.
_DEPENDENT: dict[str, dict[str, Any]] = {
    "save": {"save_every": SAVE_EVERY, "save_slack": 0, "keep": KEEP, "exit_code": 0},
    "eval_every": {"eval_batches": 1, "eval_data": None},
}


@dataclass(frozen=True, slots=True)
class _Range:
    least: float
    most: float = math.inf
    above: bool = False  # excludes `least`

    def has(self, value: float) -> bool:
        finite = isinstance(value, int) or math.isfinite(value)
        return finite and (value > self.least if self.above else value >= self.least) and value <= self.most

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"more than {self.least:g}" if self.above else f"{self.least:g} or more"
        return f"a number from {self.least:.12g} to {self.most:.12g}"


_MANY = 10**12
_RANGES: dict[str, _Range] = {
    "steps": _Range(1, _MANY), "lr": _Range(0), "warmup": _Range(0, _MANY), "min_lr": _Range(0),
    "clip": _Range(0, above=True), "weight_decay": _Range(0), "accumulate": _Range(1, _MANY),
    "seed": _Range(0, 2**32 - 1), "peak_flops": _Range(0, above=True), "timeout": _Range(1, 10**7),
    "save_every": _Range(1, _MANY), "save_slack": _Range(0, _MANY), "prefetch": _Range(0, 64), "keep": _Range(1, _MANY),
    "exit_code": _Range(0, 255), "eval_every": _Range(0, _MANY), "eval_batches": _Range(1, _MANY),
}  # fmt: skip


def a_path(text: str) -> Path:
    try:
        return path_of(text)
    except Malformed as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _resumed(text: str) -> Path | str:
    """A folder, or '' for that of --save."""
    return a_path(text) if text else ""


class Parser(argparse.ArgumentParser):
    """Raises UsageError P0535."""

    def error(self, message: str) -> NoReturn:
        message = message if len(message) <= 300 else f"{message[:200]} ... {message[-40:]}"
        raise UsageError("P0535", message, f"{self.prog} --help lists its options", alike=True)


def parse(argv: Sequence[str], root: Path) -> Job:
    """Parse train.py's command line. Raises UsageError P0503, P0521, P0529, P0531 to P0533, P0535 and P0546."""
    parser = Parser(prog="train.py", description="Train this package; one process per rank, under torchrun.")
    add = parser.add_argument
    add("--steps", type=int, default=10, help="steps of the whole training, those before --resume included; 10")
    add(
        "--optimizer",
        metavar="NAME",
        help=f"the optimizer: {', '.join(sorted(KINDS))}; the compile's (adamw), or the checkpoint's",
    )
    add("--lr", type=float, help="the learning rate; 1e-3, or the checkpoint's")
    add("--lr-schedule", choices=("constant", "linear", "cosine"), help="the learning rate after the warm-up; constant")
    add("--warmup", type=int, metavar="N", help="steps in which the learning rate rises to --lr; 0")
    add("--min-lr", type=float, metavar="LR", help="the learning rate of the last step, for linear and cosine; 0")
    add("--clip", type=float, metavar="NORM", help="scale gradients down to this norm over the whole model")
    add("--weight-decay", type=float, metavar="X", help="the weight decay; the optimizer's own default")
    add("--no-decay", action="append", metavar="GLOB", help="parameters without weight decay: '*.bias', '*norm*'")
    add(
        "--group",
        action="append",
        metavar="GLOB,..:OPTION=VALUE,..",
        help="options of the optimizer for some parameters: '*.bias:weight_decay=0', 'embed*:lr_scale=0.1', "
        "'head*:optimizer=adamw'; later groups override earlier ones",
    )
    add("--accumulate", type=int, metavar="N", help="batches of data for each step of the optimizer; 1")
    tokens = "a file of token numbers for the batch's entries, in place of the model file's data: .bin or .npy"
    add("--data", type=a_path, metavar="FILE", help=tokens)
    add("--data-dtype", choices=tuple(TOKENS), help="the type of a .bin file's numbers; uint16")
    labels = "labels are the next tokens, or the same ones, which the model shifts itself; "
    unset = "same for an entry `labels` without a loss function, as in Hugging Face models, else next"
    add("--data-labels", choices=("next", "same"), help=labels + unset)
    end = "at the end of a token file or iterable: start it again, or stop with an error; repeat"
    add("--data-end", choices=("repeat", "error"), default="repeat", help=end)
    add("--eval-every", type=int, metavar="N", help="steps between evaluations, one at the end too; 0: none")
    add("--eval-batches", type=int, default=1, metavar="K", help="batches of an evaluation; 1")
    add("--eval-data", type=a_path, metavar="FILE", help="a token file for evaluations, in place of eval_data")
    prefetch = "batches that a thread prepares in advance; 1 on GPUs and 0 on CPUs"
    add("--prefetch", type=int, metavar="N", help=prefetch)
    add("--seed", type=int, help="seed of the initial parameters and the data; the plan's")
    add(
        "--init",
        type=a_path,
        metavar="FILE",
        help="start from a state dict: safetensors, their index, or a Hugging Face folder; --resume takes precedence",
    )
    add("--virtual", action="store_true", help="all ranks in this one process, on the CPU")
    add(
        "--device",
        choices=WANTED,
        default="auto",
        help="the device of every rank; auto: its own GPU if all have one, else the CPU",
    )
    add(
        "--metrics",
        type=a_path,
        metavar="FILE",
        help="write one line of JSON per step: loss, learning rate, seconds and their split, mfu",
    )
    add("--tensorboard", type=a_path, metavar="DIR", help="the same for TensorBoard, which must be installed")
    add(
        "--peak-flops",
        type=float,
        metavar="X",
        help="peak flops per second of a rank, for mfu; a known GPU's, or measured",
    )
    add(
        "--trace",
        type=a_path,
        metavar="DIR",
        help="write the times of each rank's activities in some steps, for partc trace DIR",
    )
    add("--trace-steps", metavar="FIRST:LAST", help="the steps to trace; three after the first")
    add("--record", type=a_path, metavar="DIR", help="every step's gradients and parameters, per rank")
    add("--report", type=a_path, metavar="DIR", help="losses, times and memory, per rank, as JSON")
    add("--timeout", type=float, default=600.0, help="seconds that a rank waits for another")
    add("--save", type=a_path, metavar="DIR", help="write checkpoints into this folder, which all ranks share")
    slack = "further steps that may run while a checkpoint is being written; a failure loses them too; 0"
    add("--save-slack", type=int, default=0, metavar="N", help=slack)
    add(
        "--save-every",
        type=int,
        default=SAVE_EVERY,
        metavar="N",
        help=f"steps between checkpoints; one is written at the end too; {SAVE_EVERY}",
    )
    add("--keep", type=int, default=KEEP, metavar="K", help=f"keep only the newest K checkpoints; {KEEP}")
    add(
        "--resume",
        nargs="?",
        const="",
        type=_resumed,
        metavar="DIR",
        help="continue from the newest whole checkpoint in DIR (by default --save's, which may have none yet), "
        "or from DIR/step_..., on any mesh",
    )
    add("--exit-code", type=int, default=0, metavar="N", help="the exit code after SIGTERM or SIGUSR1 with --save; 0")
    add(
        "--check-nans",
        action="store_true",
        help="stop at a loss that is not finite, and name the region that produced it",
    )
    add(
        "--tuned",
        type=a_path,
        metavar="FILE",
        help="kernel configurations for GPUs; by default the first run times some, for kernels/tuned.json",
    )
    add(
        "--deterministic",
        action="store_true",
        help="the same bits in every run on the same GPUs, by slower algorithms for attention and indexed sums",
    )
    add(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        help="record a step on the GPU and replay it, without launches from Python; as compiled",
    )
    add(
        "--attention",
        choices=attention_kernels.WANTED,
        default="auto",
        help="the preferred attention kernel on GPUs; attentions that it cannot compute use the next; auto: the first",
    )
    add("--no-tuning", dest="tuning", action="store_false", help="use the package's own kernel configurations")
    own = parser.add_argument_group("options of optimizers", "for the classes in brackets; the defaults are theirs")
    for name, kinds in _optimizer_options().items():
        switch = all(isinstance(KINDS[kind].parameters[name].default, bool) for kind in kinds)
        how: dict[str, Any] = {"nargs": "?", "const": "true"} if switch else {}
        option = f"--{name.replace('_', '-')}"
        own.add_argument(option, dest=f"{_OPTION}{name}", metavar="X", help=f"[{', '.join(kinds)}]", **how)
    arguments = vars(parser.parse_args(argv))
    options = {name: arguments.pop(f"{_OPTION}{name}") for name in _optimizer_options()}
    arguments["options"] = {name: value for name, value in options.items() if value is not None}
    plan_file = root / "plan.json"
    if not plan_file.is_file():
        raise UsageError("P0503", f"{root} has no plan.json", "run train.py from the folder that partc compile wrote")
    for name, allowed in _RANGES.items():
        if arguments[name] is not None and not allowed.has(arguments[name]):
            raise _out_of_range(name, arguments[name], str(allowed))
    if arguments["virtual"] and arguments["device"] == "cuda":
        raise UsageError("P0521", "--virtual ranks are on the CPU", "leave out --device cuda, or --virtual", alike=True)
    if arguments["virtual"] and arguments["prefetch"]:
        raise UsageError(
            "P0521", "--virtual ranks share their batches", "leave out --prefetch, or --virtual", alike=True
        )
    if arguments["trace_steps"] is not None:
        if arguments["trace"] is None:
            raise UsageError("P0521", "--trace-steps has no --trace", "name a folder: --trace DIR", alike=True)
        wanted_steps(arguments["trace_steps"], 0, arguments["steps"])
    if arguments["tensorboard"] is not None and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("P0529", "TensorBoard is not installed", "pip install tensorboard", alike=True)
    if (root / "kernels").is_dir() and importlib.util.find_spec("triton") is None:
        help = "pip install triton, or compile with --kernels aten"
        raise UsageError("P0531", "the package's kernels need Triton, which is not installed", help, alike=True)
    if arguments["tuned"] is not None:
        if not arguments["tuning"]:
            raise _contradicted("--tuned names configurations, and --no-tuning leaves them aside", "--no-tuning")
        given(arguments["tuned"])
    resume = arguments.pop("resume")
    if resume == "" and arguments["save"] is None:
        raise UsageError("P0521", "--resume has no folder", "name one, or add --save DIR to continue there", alike=True)
    try:
        plan = plans.read(root)
    except Malformed as error:
        raise UsageError(
            "P0503", f"{plan_file} {error}", "compile again: the file has been changed", alike=True
        ) from None
    command = plan.get("command", {})
    for pattern in arguments["no_decay"] or ():
        if not spared(plan["parameters"], (pattern,)):
            help = "plan.json lists the parameters' names; quote patterns, so that the shell leaves them as they are"
            raise UsageError("P0521", f"--no-decay {pattern!r} is the name of no parameter", help, alike=True)
    if arguments["cuda_graphs"] is None:
        arguments["cuda_graphs"] = command.get("cuda_graphs", False)
    if arguments["cuda_graphs"]:
        _check_graphs(arguments, plan)
    if arguments["eval_every"] is None:
        arguments["eval_every"] = command.get("eval_every", 0)
    elif arguments["eval_every"] and not (root / "evaluation").is_dir():
        cause = "--eval-every has nothing to run: the model file defines no evaluate(model, batch)"
        help = "define one, or compile with --eval-every, which evaluates the loss"
        raise UsageError("P0546", cause, help, alike=True)
    for needed, dependents in _DEPENDENT.items():
        for name, default in dependents.items():
            if not arguments[needed] and arguments[name] != default:
                raise _contradicted(f"{_option(name)} says nothing without {_option(needed)}", _option(name))
    for name in ("data", "eval_data"):
        if arguments[name] is not None:
            arguments[name] = str(arguments[name].resolve())
    named = frozenset(name for name in _CONTINUED if arguments[name] is not None)
    compiled = {name: command[name] for name in ("optimizer", "group", "lr") if name in command}
    for name, value in {"seed": plan["seed"], **_DEFAULTS, **compiled}.items():
        if name not in named:
            arguments[name] = value
    folder = resume or (None if resume is None else arguments["save"])
    job = Job(root=root, plan=plan, resume=folder, given=named, **arguments)
    return job if folder is not None and "optimizer" not in named else _with_options(job)


def _optimizer_options() -> dict[str, list[str]]:
    """The options that have no flag of their own, and the optimizers that take them."""
    found: dict[str, list[str]] = {}
    for kind in KINDS.values():
        for name in kind.parameters:
            if name != "weight_decay":
                found.setdefault(name, []).append(kind.name)
    return dict(sorted(found.items()))


def told_of_memory(job: Job) -> str:
    """A line for a run whose optimizer keeps other tensors than that of the memory account; '' if it does not."""
    command = job.plan.get("command", {})
    optimizer = command.get("optimizer", recipes.DEFAULT)
    compiled = Recipe.of(optimizer, groups=command.get("group", ()), balance=job.balance)
    if compiled.states(job.dims) == job.recipe.states(job.dims):
        return ""
    return f"the memory account in plan.json is for {compiled}: this run's optimizer is {job.optimizer}"


def _with_options(job: Job, before: str = "") -> Job:
    """The job with the options of its optimizer checked; `before` is the optimizer of the checkpoint.

    Raises UsageError P0521, P0533 and P0551.
    """
    text = job.optimizer
    if before and recipes.parsed(before)[0] == recipes.parsed(text)[0]:
        text = recipes.merged(before, recipes.parsed(text)[1])
    job = dataclasses.replace(job, optimizer=recipes.merged(text, job.options), options={})
    if job.min_lr > job.lr:
        raise _contradicted(f"--min-lr {job.min_lr:g} is more than --lr {job.lr:g}", "--min-lr")
    if job.min_lr and "min_lr" in job.given and job.lr_schedule == "constant":
        raise _contradicted("--min-lr is the end of a schedule that falls, and this one is constant", "--min-lr")
    for name in ("data_dtype", "data_labels"):
        if name in job.given and job.data is None and job.eval_data is None:
            raise _contradicted(f"{_option(name)} says nothing without --data", _option(name))
    shapes = {name: len(entry["shape"]) for name, entry in job.plan["parameters"].items()}
    job.recipe.check(shapes)
    for name, settings in job.recipe.all_settings(job.dims).items():
        if job.cuda_graphs and not settings.kind.fused:
            why = f"the update of {name} by {settings.name} takes numbers from the host"
            raise _uncaptured(why, "add --no-cuda-graphs, or choose adam, adamw or sgd")
    return job


def check_places(job: Job) -> None:
    """Check that a run on this machine can read and write the files in its options.

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
                fitting(job.init, job.plan, _undecided)
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
            raise _contradicted(f"{_option(user)} and {_option(name)} both name {path}", _option(name))
        why = _why_not(name, path, folder)
        if why:
            raise UsageError("P0526" if name == "save" else "P0538", why, _ROOM, alike=True)


class _Undecided(Exception):
    """Only the model itself can decide."""


def _undecided() -> NoReturn:
    raise _Undecided


_ROOM = "name a place with room that all ranks can write to"


def _why_not(name: str, path: Path, folder: Path) -> str:
    """The reason why `path`, which is `folder` or a file in it, cannot be written; '' if it can. New folders are made
    later.
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
    """Whether a file is empty, or starts as the metrics of a run."""
    with regular(path) as file:
        line = file.readline(1 << 20)
    try:
        return not line or "step" in decoded(dict[str, Any], parsed(line))
    except Malformed:
        return False


def _check_graphs(arguments: dict[str, Any], plan: dict[str, Any]) -> None:
    """Raise UsageError P0533 if the host takes part in a step."""
    if "uncaptured" in plan:
        raise _uncaptured(plan["uncaptured"], "leave out --cuda-graphs, or add --no-cuda-graphs")
    for name, why in (
        ("check_nans", "stops in the middle of a step"),
        ("trace", "asks in the middle of a step what time it is"),
    ):
        if arguments[name]:
            raise _uncaptured(f"{_option(name)} {why}", f"leave out {_option(name)}, or add --no-cuda-graphs")


def _uncaptured(cause: str, help: str) -> UsageError:
    return UsageError("P0533", f"a step cannot be recorded as CUDA graphs: {cause}", help, alike=True)


def _out_of_range(name: str, value: float, allowed: str) -> UsageError:
    return UsageError("P0521", f"{_option(name)} {value} is out of range", f"give {allowed}", alike=True)


def _contradicted(cause: str, option: str) -> UsageError:
    return UsageError("P0521", cause, f"leave out {option}, or correct it", alike=True)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def prepared(job: Job, together: Together, say: Say) -> Job:
    """The job with the checkpoint that it continues, once all ranks agree. Raises UsageError P0522 to P0525."""
    if job.resume is not None:
        checkpoint = newest(job.resume, together, needed=job.resume != job.save, say=say)
        if checkpoint is None:
            say(f"{job.resume} has no checkpoint yet: starting at the beginning")
            job = _with_options(job)
        else:
            checkpoint.check_fits(job.plan)
            say(f"continuing from {checkpoint.path}, after step {checkpoint.step}")
            job = dataclasses.replace(job, checkpoint=checkpoint, **_continued(job, checkpoint))
            job = _with_options(job, checkpoint.run["optimizer"])
            _check_states(job, checkpoint)
            if checkpoint.step >= job.steps:
                say(f"nothing is left to do: --steps {job.steps} counts those that were done before")
    if job.save is not None:
        attempt, _, problem = together.told(f"{uuid.uuid4().hex[:8]} {_occupied(job, job.save)}").partition(" ")
        if problem:
            raise UsageError("P0522", problem, "continue it with --resume, or save in another folder", alike=True)
        job = dataclasses.replace(job, attempt=attempt)
    return job


def _continued(job: Job, checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's settings for options that the command line omits; the learning rate may change."""
    for name in ("seed", "accumulate"):  # a step's batches follow from its number and theirs
        if name in job.given and getattr(job, name) != checkpoint.run[name]:
            raise UsageError(
                "P0521",
                f"--{name} is {getattr(job, name)}, the checkpoint was made with {checkpoint.run[name]}",
                f"leave out --{name}",
                alike=True,
            )
    return {name: checkpoint.run.get(name, _DEFAULTS.get(name)) for name in _CONTINUED if name not in job.given}


def _check_states(job: Job, checkpoint: Checkpoint) -> None:
    """Raise UsageError P0521 if the optimizer keeps other tensors than the checkpoint has."""
    mine, theirs = job.recipe.states(job.dims), sorted(map(list, states_in(checkpoint.run)))
    if recipes.parsed(job.optimizer)[0] != recipes.parsed(checkpoint.run["optimizer"])[0] or mine != theirs:
        raise UsageError(
            "P0521",
            f"the optimizer is {job.optimizer}, the checkpoint was made with {checkpoint.run['optimizer']}",
            "leave out --optimizer, and options that change which tensors it keeps",
            alike=True,
        )


def _occupied(job: Job, folder: Path) -> str:
    """The reason why this run must not save in a folder (it has another run's or later checkpoints); '' if it may."""
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
