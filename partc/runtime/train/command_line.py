"""The command line of train.py: a table of its options, and the job that they describe."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from .. import plan as plans
from ..documents import Malformed, path_of
from ..errors import UsageError
from ..ops import attention_kernels
from ..optimizer.kinds import KINDS
from ..optimizer.recipe import matching_names
from ..processes.devices import WANTED
from .job import CONTINUED, DEFAULTS, KEEP, SAVE_EVERY, Job, contradiction, option, uncaptured_refusal, with_options
from .tokens import DTYPES as TOKENS
from .trace import wanted_steps
from .tuning import read_table

_OPTION = "option_"  # prefix of the arguments for optimizers' options


@dataclass(frozen=True, slots=True)
class Range:
    """The values of a numeric option."""

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


@dataclass(frozen=True, slots=True)
class TrainOption:
    """An option of train.py: its name, which is a field of Job, and its values.

    `shown` is the default in help; `value` is the default for argparse, None if the package or a checkpoint decides.
    """

    name: str
    help: str
    shown: str = ""
    metavar: str | None = None
    type: Callable[[str], Any] | None = None
    allowed: Range | None = None
    choices: Sequence[str] = ()
    value: Any = None
    how: dict[str, Any] = field(default_factory=dict)  # further arguments of argparse

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the option to a parser. argparse expands % in help."""
        help = self.help + (f" [default: {self.shown}]" if self.shown else "")
        how: dict[str, Any] = {"help": help.replace("%", "%%"), "dest": self.name, "default": self.value} | self.how
        if self.choices:
            how["choices"] = tuple(self.choices)
        elif "action" not in how or how["action"] == "append":
            how |= {"metavar": self.metavar, "type": self.type}
        parser.add_argument(option(self.name), **how)


def a_path(text: str) -> Path:
    try:
        return path_of(text)
    except Malformed as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _resumed(text: str) -> Path | str:
    """The folder of --resume; '' stands for the folder of --save."""
    return a_path(text) if text else ""


_MANY = 10**12
_COUNT, _SOME = Range(1, _MANY), Range(0, _MANY)
_GIVEN = "the package's"
_FLAG = {"action": "store_true", "default": False}
_SEVERAL = {"action": "append"}


def _number(
    name: str, help: str, shown: str, allowed: Range, metavar: str = "N", value: float | None = None
) -> TrainOption:
    """A numeric option: an integer if the metavar is N or K, else a float."""
    kind = int if metavar in ("N", "K") else float
    return TrainOption(name, help, shown, metavar, kind, allowed, value=value)


def _path(name: str, help: str, metavar: str = "DIR") -> TrainOption:
    return TrainOption(name, help, metavar=metavar, type=a_path)


OPTIONS: tuple[TrainOption, ...] = (
    _number("steps", "steps of the whole training, those before --resume included", "10", _COUNT, value=10),
    TrainOption(
        "optimizer",
        f"the optimizer: {', '.join(sorted(KINDS))}",
        f"{_GIVEN}, adamw; with --resume, the checkpoint's",
        metavar="NAME",
    ),
    _number("lr", "the learning rate", f"{_GIVEN}, 1e-3; with --resume, the checkpoint's", Range(0), "LR"),
    TrainOption(
        "lr_schedule", "the learning rate after the warm-up", "constant", choices=("constant", "linear", "cosine")
    ),
    _number("warmup", "steps in which the learning rate rises to --lr", "0", _SOME),
    _number("min_lr", "the learning rate of the last step, for linear and cosine", "0", Range(0), "LR"),
    _number("clip", "scale gradients down to this norm over the whole model", "", Range(0, above=True), "NORM"),
    _number("weight_decay", "the weight decay", "the optimizer's own", Range(0), "X"),
    TrainOption("no_decay", "parameters without weight decay: '*.bias', '*norm*'", metavar="GLOB", how=_SEVERAL),
    TrainOption(
        "group",
        "options of the optimizer for some parameters: '*.bias:weight_decay=0', 'embed*:lr_scale=0.1', "
        "'head*:optimizer=adamw'; later groups override earlier ones",
        metavar="GLOB,..:OPTION=VALUE,..",
        how=_SEVERAL,
    ),
    _number("accumulate", "batches of data for each step of the optimizer", "1", _COUNT),
    _path(
        "data",
        "a file of token numbers for the batch's entries, in place of the model file's data: .bin or .npy",
        metavar="FILE",
    ),
    TrainOption("data_dtype", "the type of a .bin file's numbers", "uint16", choices=tuple(TOKENS)),
    TrainOption(
        "data_labels",
        "labels are the next tokens, or the same ones, which the model shifts itself",
        "same for an entry `labels` without a loss function, as in Hugging Face models, else next",
        choices=("next", "same"),
    ),
    TrainOption(
        "data_end",
        "at the end of a token file or iterable: start it again, or stop with an error",
        "repeat",
        choices=("repeat", "error"),
        value="repeat",
    ),
    _number("eval_every", "steps between evaluations, one at the end too; 0: none", _GIVEN, _SOME),
    _number("eval_batches", "batches of an evaluation", "1", _COUNT, "K", value=1),
    _path("eval_data", "a token file for evaluations, in place of eval_data", metavar="FILE"),
    _number("prefetch", "batches that a thread prepares in advance", "1 on GPUs, 0 on CPUs", Range(0, 64)),
    _number("seed", "seed of the initial parameters and the data", _GIVEN, Range(0, 2**32 - 1)),
    _path(
        "init",
        "start from a state dict: safetensors, their index, or a Hugging Face folder; --resume takes precedence",
        metavar="FILE",
    ),
    TrainOption("virtual", "all ranks in this one process, on the CPU or with --device cuda on one GPU", how=_FLAG),
    TrainOption(
        "device",
        "the device of every rank; auto: its own GPU if all have one, else the CPU",
        "auto",
        choices=WANTED,
        value="auto",
    ),
    _path(
        "metrics", "write one line of JSON per step: loss, learning rate, seconds and their split, mfu", metavar="FILE"
    ),
    _path("tensorboard", "the same for TensorBoard, which must be installed"),
    _number(
        "peak_flops",
        "peak flops per second of a rank, for mfu",
        "a known GPU's, or measured",
        Range(0, above=True),
        "X",
    ),
    _path("trace", "write the times of each rank's activities in some steps, for partc trace DIR"),
    TrainOption("trace_steps", "the steps to trace", "three after the first", metavar="FIRST:LAST"),
    _path("record", "every step's gradients and parameters, per rank"),
    _path("report", "losses, times and memory, per rank, as JSON"),
    _number("timeout", "seconds that a rank waits for another", "600", Range(1, 10**7), "S", value=600.0),
    _path("save", "write checkpoints into this folder, which all ranks share"),
    _number(
        "save_slack",
        "further steps that may run while a checkpoint is being written; a failure loses them too",
        "0",
        _SOME,
        value=0,
    ),
    _number(
        "save_every",
        "steps between checkpoints; one is written at the end too",
        str(SAVE_EVERY),
        _COUNT,
        value=SAVE_EVERY,
    ),
    _number("keep", "keep only the newest K checkpoints", str(KEEP), _COUNT, "K", value=KEEP),
    TrainOption(
        "resume",
        "continue from the newest whole checkpoint in DIR (without DIR that of --save, which may have none yet), or "
        "from DIR/step_..., on any mesh",
        metavar="DIR",
        type=_resumed,
        how={"nargs": "?", "const": ""},
    ),
    _number("exit_code", "the exit code after SIGTERM or SIGUSR1 with --save", "0", Range(0, 255), value=0),
    TrainOption("check_nans", "stop at a loss that is not finite, and name the region that produced it", how=_FLAG),
    _path(
        "tuned",
        "kernel configurations for GPUs; without it the first run times some, for kernels/tuned.json",
        metavar="FILE",
    ),
    TrainOption(
        "deterministic",
        "the same bits in every run on the same GPUs, by slower algorithms for attention and indexed sums",
        how=_FLAG,
    ),
    TrainOption(
        "cuda_graphs",
        "record a step on the GPU and replay it, without launches from Python",
        _GIVEN,
        how={"action": argparse.BooleanOptionalAction},
    ),
    TrainOption(
        "attention",
        "the preferred attention kernel on GPUs; attentions that it cannot compute use the next; auto: the first",
        "auto",
        choices=attention_kernels.WANTED,
        value="auto",
    ),
    TrainOption(
        "no_tuning",
        "use the package's own kernel configurations",
        how={"action": "store_false", "dest": "tuning", "default": True},
    ),
)

# Options that only have an effect with another option, with their defaults.
_DEPENDENT: dict[str, dict[str, Any]] = {
    "save": {"save_every": SAVE_EVERY, "save_slack": 0, "keep": KEEP, "exit_code": 0},
    "eval_every": {"eval_batches": 1, "eval_data": None},
}


class Parser(argparse.ArgumentParser):
    """Raises UsageError P0535."""

    def error(self, message: str) -> NoReturn:
        message = message if len(message) <= 300 else f"{message[:200]} ... {message[-40:]}"
        raise UsageError("P0535", message, f"{self.prog} --help lists its options", alike=True)


def parse(argv: Sequence[str], root: Path) -> Job:
    """Parse train.py's command line. Raises UsageError P0503, P0521, P0529, P0531 to P0533, P0535 and P0546."""
    arguments = _parsed(argv)
    plan_file = root / "plan.json"
    if not plan_file.is_file():
        raise UsageError("P0503", f"{root} has no plan.json", "run train.py from the folder that partc compile wrote")
    _check_values(arguments)
    _check_installed(arguments, root)
    try:
        plan = plans.read(root)
    except Malformed as error:
        help = "compile again: the file has been changed"
        raise UsageError("P0503", f"{plan_file} {error}", help, alike=True) from None
    return _job(arguments, root, plan)


def _parsed(argv: Sequence[str]) -> dict[str, Any]:
    """The values of all options; the entry `options` has the optimizer's options."""
    parser = Parser(prog="train.py", description="Train this package; one process per rank, under torchrun.")
    for each in OPTIONS:
        each.add_to(parser)
    own = parser.add_argument_group("options of optimizers", "for the classes in brackets; the defaults are theirs")
    for name, kinds in _optimizer_options().items():
        switch = all(isinstance(KINDS[kind].parameters[name].default, bool) for kind in kinds)
        how: dict[str, Any] = {"nargs": "?", "const": "true"} if switch else {}
        own.add_argument(option(name), dest=f"{_OPTION}{name}", metavar="X", help=f"[{', '.join(kinds)}]", **how)
    arguments = vars(parser.parse_args(argv))
    options = {name: arguments.pop(f"{_OPTION}{name}") for name in _optimizer_options()}
    return {**arguments, "options": {name: value for name, value in options.items() if value is not None}}


def _check_values(arguments: dict[str, Any]) -> None:
    """Check options without the package. Raises UsageError P0521."""
    for each in OPTIONS:
        value = None if each.allowed is None else arguments[each.name]
        if each.allowed is not None and value is not None and not each.allowed.has(value):
            cause = f"{option(each.name)} {value} is out of range"
            raise UsageError("P0521", cause, f"give {each.allowed}", alike=True)
    if arguments["virtual"] and arguments["prefetch"]:
        cause = "--virtual ranks share their batches"
        raise UsageError("P0521", cause, "leave out --prefetch, or --virtual", alike=True)
    if arguments["trace_steps"] is not None:
        if arguments["trace"] is None:
            raise UsageError("P0521", "--trace-steps has no --trace", "name a folder: --trace DIR", alike=True)
        wanted_steps(arguments["trace_steps"], 0, arguments["steps"])
    if arguments["tuned"] is not None:
        if not arguments["tuning"]:
            raise contradiction("--tuned and --no-tuning exclude each other", "--no-tuning")
        read_table(arguments["tuned"])
    if arguments["resume"] == "" and arguments["save"] is None:
        raise UsageError("P0521", "--resume has no folder", "name one, or add --save DIR to continue there", alike=True)


def _check_installed(arguments: dict[str, Any], root: Path) -> None:
    """Check that the libraries that the run needs are installed. Raises UsageError P0529 and P0531."""
    if arguments["tensorboard"] is not None and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("P0529", "TensorBoard is not installed", "pip install tensorboard", alike=True)
    if (root / "kernels").is_dir() and importlib.util.find_spec("triton") is None:
        help = "pip install triton, or compile with --kernels aten"
        raise UsageError("P0531", "the package's kernels need Triton, which is not installed", help, alike=True)


def _job(arguments: dict[str, Any], root: Path, plan: dict[str, Any]) -> Job:
    """The job for checked arguments, with defaults from the package's plan. Raises UsageError P0521, P0533 and
    P0546.
    """
    command = plan.get("command", {})
    for pattern in arguments["no_decay"] or ():
        if not matching_names(plan["parameters"], (pattern,)):
            help = "plan.json lists the parameters' names; quote patterns, so that the shell leaves them as they are"
            raise UsageError("P0521", f"--no-decay {pattern!r} matches no parameter", help, alike=True)
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
                raise contradiction(f"{option(name)} has no effect without {option(needed)}", option(name))
    for name in ("data", "eval_data"):
        if arguments[name] is not None:
            arguments[name] = str(arguments[name].resolve())
    named = frozenset(name for name in CONTINUED if arguments[name] is not None)
    compiled = {name: command[name] for name in ("optimizer", "group", "lr") if name in command}
    for name, value in {"seed": plan["seed"], **DEFAULTS, **compiled}.items():
        if name not in named:
            arguments[name] = value
    resume = arguments.pop("resume")
    folder = resume or (None if resume is None else arguments["save"])
    job = Job(root=root, plan=plan, resume=folder, given=named, **arguments)
    return job if folder is not None and "optimizer" not in named else with_options(job)


def _optimizer_options() -> dict[str, list[str]]:
    """The options of optimizers without a separate flag -> the optimizers that take them."""
    found: dict[str, list[str]] = {}
    for kind in KINDS.values():
        for name in kind.parameters:
            if name != "weight_decay":
                found.setdefault(name, []).append(kind.name)
    return dict(sorted(found.items()))


def _check_graphs(arguments: dict[str, Any], plan: dict[str, Any]) -> None:
    """Raise UsageError P0533 if CUDA graphs are wanted but the host takes part in a step."""
    if "uncaptured" in plan:
        raise uncaptured_refusal(plan["uncaptured"], "leave out --cuda-graphs, or add --no-cuda-graphs")
    for name, why in (
        ("check_nans", "stops in the middle of a step"),
        ("trace", "reads the time in the middle of a step"),
    ):
        if arguments[name]:
            raise uncaptured_refusal(f"{option(name)} {why}", f"leave out {option(name)}, or add --no-cuda-graphs")
