"""The compile options of the command line, and the model or package to which they apply."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from partc.compilation.given_options import COMPRESSIONS, DEFAULTS, KERNELS, RECORDED, SUMS, GivenOptions
from partc.errors import PartcError
from partc.ir.program import PRECISIONS
from partc.schedules import SCHEDULES

if TYPE_CHECKING:
    from partc.compilation.options import Options
    from partc.cost.formulas import Formulas
    from partc.cost.memory import Account
    from partc.ir.mesh import Mesh


def options(given: Mapping[str, Any]) -> tuple[Options, dict[str, str]]:
    """The checked options of a compile, and the options of the model file."""
    from partc.compilation.options import Options

    names = [item.name for item in fields(GivenOptions) if item.name in given]
    return Options.checked(**{name: given[name] for name in names}), definitions(given)


def definitions(given: Mapping[str, Any]) -> dict[str, str]:
    """The options of the model file. Raises PartcError P0003 and P0004."""
    found: dict[str, str] = {}
    for text in given["definitions"]:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise PartcError("P0003", f"-D {text!r} is not NAME=VALUE", help="for example -D layers=4")
        _define(found, name, value)
    for name in ("batch", "seq"):
        if given[name] is not None:
            if given[name] < 1:
                raise PartcError("P0004", f"--{name} {given[name]} is out of range", help="give 1 or more")
            _define(found, name, str(given[name]))
    return found


def _define(definitions: dict[str, str], name: str, value: str) -> None:
    if name in definitions:
        raise PartcError("P0003", f"option {name!r} is given twice", help="give it one value")
    definitions[name] = value


def of_plan(path: Path, context: click.Context) -> dict[str, Any]:
    """The compile options that a plan decides; the command line gives the others.

    Raises PartcError P0804, and P0815 if the command line gives an option that the plan decides.
    """
    from partc.compilation.plan import decisions, read

    found = decisions(read(path))
    for name in options_on_command_line(context, (*found, "batch", "seq")):
        flag = "-D" if name == "definitions" else f"--{name.replace('_', '-')}"
        raise PartcError("P0815", f"{flag} is given, and {path} decides it", help="leave it out, or change the plan")
    return found


def options_on_command_line(context: click.Context, names: Iterable[str]) -> Iterator[str]:
    """The names of the options that are on the command line."""
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            yield name


def target(name: str, given: Mapping[str, Any]) -> tuple[str, Options, dict[str, str]]:
    """The model file, compile options and model options for a target: as given, or those of a package.

    Raises PartcError P0201 if there is no such file or folder, and P0603 if the mesh does not go with it.
    """
    from partc.frontend.model_files.example_files import example_hint
    from partc.frontend.model_files.huggingface import PREFIX

    if not name.startswith(PREFIX) and not os.path.exists(name):
        raise PartcError("P0201", f"there is no package and no model file {name}", help=example_hint(Path(name)))
    if os.path.isdir(name):
        if given["mesh"] is not None or given["definitions"]:
            raise PartcError(
                "P0603", f"{name} is a package, with a mesh and options of its own", help="inspect its model file"
            )
        return of_package(Path(name), {name: given[name] for name in ("optimizer", "group", "lr") if given.get(name)})
    if given["mesh"] is None:
        raise PartcError("P0603", "inspecting a model needs a mesh", help="add --mesh SPEC, for example --mesh 2x2x2")
    wanted, found = options(given)
    return name, wanted, found


def of_package(directory: Path, changed: Mapping[str, Any]) -> tuple[str, Options, dict[str, str]]:
    """The model file, compile options and model options of a package, with some options changed."""
    from partc.package.launch import read_plan

    wanted, found = of_record(read_plan(directory), directory, changed)
    return str(directory / "model.py"), wanted, found


def of_record(plan: Mapping[str, Any], directory: Path, changed: Mapping[str, Any]) -> tuple[Options, dict[str, str]]:
    """The compile options and model options that a package's plan.json records, with some options changed."""
    from partc.compilation.options import TABLE

    kept = {name: plan[name] for name in ("mesh", "microbatches", "precision", "seed")}
    command = {**RECORDED, **{name: value for name, value in plan["command"].items() if name in RECORDED}}
    if command["schedule"] == TABLE:
        command["schedule"] = str(directory / TABLE)
    definitions = [f"{name}={value}" for name, value in plan["options"].items()]
    return options({"batch": None, "seq": None, **kept, **command, **changed, "definitions": definitions})


Command = TypeVar("Command", bound=Callable[..., Any])


def _option(name: str, help: str, *, flag: str = "", **how: Any) -> Callable[[Command], Command]:
    """The click option of a field of GivenOptions, with its default."""
    default = DEFAULTS[name]
    if isinstance(default, tuple):
        how["multiple"] = True
    elif isinstance(default, bool):
        how["is_flag"] = True
    elif default is not None:
        how |= {"default": default, "show_default": True}
    return click.option(flag or f"--{name.replace('_', '-')}", name, help=help, **how)


def _adding(options: Sequence[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    """A decorator that adds options to a command, in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def compile_options(required: bool) -> Callable[[Command], Command]:
    """A decorator that adds the compile options to a command."""
    options = [
        click.option(
            "--mesh", metavar="SPEC", required=required, help="sizes of the axes: 8, 4x8, 2x4x8 or pp=2,dp=4,tp=8"
        ),
        _option(
            "experts",
            "experts are cut over N neighbours along dp, cp or tp: ep=4@dp, ep=8@dp,cp, ep=4@dp=2,tp=2",
            metavar="ep=N@AXES",
        ),
        _option(
            "batch_over",
            "in these calls tp or cp cuts the batch, and weights are whole: tp=embed,blocks.0-15",
            metavar="AXIS=CALL,..",
        ),
        click.option("-D", "definitions", metavar="NAME=VALUE", multiple=True, help="an option of the model file"),
        click.option("--batch", type=int, help="the same as -D batch=..., for hf: models"),
        click.option("--seq", type=int, help="the same as -D seq=..., for hf: models"),
        _option("microbatches", "number of microbatches of the global batch", type=int),
        _option("schedule", f"{', '.join(SCHEDULES)}, or a table of actions", metavar="NAME|FILE.csv"),
        _option("virtual_stages", "stages of each rank, for interleaved [default: 2]", type=int, metavar="N"),
        _option(
            "stage_calls",
            "calls of each stage, as in 9,8*2,9 for four stages [default: stages with about the same work]",
            metavar="N,N,..",
        ),
        _option("precision", "element type of products and of what they read", type=click.Choice(PRECISIONS)),
        _option("casts", "with bf16 or fp16: softmax=fp32, add=any", flag="--cast", metavar="OP=TYPE"),
        _option("seed", "seed of the initial parameters and the data", type=int),
        _option(
            "zero",
            "ZeRO: shard optimizer state (1), also gradients (2), also parameters (3) over dp (3@8: 8 of dp)",
            metavar="0|1|2|3[@AXES|@RANKS]",
        ),
        _option(
            "recompute",
            "recompute in backward: nothing; large and cheap values; all but the inputs of regions; operations by "
            "name (softmax,all_gather); or as little as keeps every rank within a number of bytes (18GB); stages may "
            "differ: full*2/none*6",
            metavar="none|selective|full|OPS|BYTES",
        ),
        _option(
            "loss_chunks",
            "compute logits in N chunks, one in memory at a time; backward computes them again",
            type=int,
            metavar="N",
        ),
        _option(
            "expert_capacity",
            "an expert takes F times its even share of the rows of a sequence (or @microbatch); rows beyond it "
            "contribute 0",
            metavar="F[@SCOPE]",
        ),
        _option(
            "expert_rows",
            "budget memory for F times the mean number of rows of a rank's experts; warn when a step has more",
            type=float,
            metavar="F",
        ),
        _option(
            "router_bias_rate",
            "after each step, move the routers' biases by R towards experts with fewer tokens (DeepSeek-V3's)",
            type=float,
            metavar="R",
        ),
        _option(
            "kernels",
            "fused Triton kernels, PyTorch's own kernels (aten), or torch.compile's (inductor); auto is triton if "
            "this machine has a GPU, else aten",
            type=click.Choice(KERNELS),
        ),
        _option("bucket", "size of the gradient buckets that are summed during backward", metavar="BYTES"),
        _option(
            "nodes", "ranks of a node: gradients are summed inside nodes first, then across", type=int, metavar="N"
        ),
        _option("grad_reduce", "precision of gradient sums over ranks", type=click.Choice(SUMS)),
        _option(
            "compress_grads",
            "format of gradients that cross nodes (without --nodes: ranks), with error feedback",
            type=click.Choice(COMPRESSIONS),
        ),
        _option("cuda_graphs", "make train.py record a step as CUDA graphs and replay it; an error if impossible"),
        _option(
            "optimizer",
            "train.py's default optimizer, which the memory account assumes: sgd:momentum=0.9, muon, ... "
            "[default: the model file's optimizer(), or adamw]",
            metavar="NAME[:OPTION=VALUE,..]",
        ),
        _option(
            "group",
            "options of the optimizer for some parameters: 'embed*:optimizer=adamw,lr_scale=0.1'",
            metavar="GLOB,..:OPTION=VALUE,..",
        ),
        _option(
            "lr",
            "train.py's default learning rate [default: that of the model file's optimizer(), or 1e-3]",
            type=float,
        ),
        _option(
            "eval_every",
            "train.py's default number of steps between evaluations, of the loss if the model file has no evaluate()",
            type=int,
            metavar="N",
        ),
        _option(
            "forward_only",
            "a package for inference: infer.py writes what infer(model, batch), or else the model, returns",
        ),
        _option("shard", "pin a layout: '*.wq.weight=[@tp, _]', 't.weight=whole'", metavar="GLOB=LAYOUT"),
    ]
    return _adding(options)


# The options of a plan's search, in addition to the model's own.
AUTOMATIC = ("cluster", "ranks", "global_batch", "memory", "fix", "per_layer", "max_seconds")


def automatic_options(*, batch: bool = True) -> Callable[[Command], Command]:
    """A decorator that adds the options of a plan's search to a command; all are unset by default."""
    options = [
        click.option("--cluster", metavar="SPEC", help="8xH100-80GB, 16x8xA100-80GB, 4xCPU or FILE.toml"),
        click.option("--ranks", type=int, metavar="N", help="ranks to use [default: all devices of the cluster]"),
        click.option("--memory", metavar="BYTES", help="memory of a rank [default: the device's]"),
        click.option("--fix", metavar="NAME=VALUE|..,..", help="decide something yourself: 'tp=4|8,zero=1'"),
        click.option(
            "--per-layer", is_flag=True, default=None, help="also plans whose tp cuts the batch of some calls"
        ),
        click.option(
            "--max-seconds", type=float, metavar="S", help="stop planning then, with the best so far [default: 30]"
        ),
    ]
    if batch:
        options[2:2] = [
            click.option(
                "--global-batch",
                metavar="SAMPLES|TOKENS",
                help="the batch of a step: 512, '4M tokens', 4Mtok; M is 2^20",
            )
        ]
    return _adding(options)


def memory(name: str, given: Mapping[str, Any]) -> tuple[Account, Mesh]:
    """The memory account of a package (from its plan) or of a compiled model, and the mesh."""
    from partc.ir.mesh import Mesh

    if os.path.isdir(name) and not given["optimizer"] and not given["group"]:
        from partc.cost.memory import Account
        from partc.package.launch import read_plan

        plan = read_plan(Path(name))
        if given["mesh"] is not None or given["definitions"]:
            raise PartcError(
                "P0603", f"{name} is a package, with a mesh and options of its own", help="name its model file"
            )
        return Account.of(plan.get("memory")), Mesh.parse(plan["mesh"])
    model, wanted, definitions = target(name, given)
    from partc.api import compilation
    from partc.rehearsal.rehearsal import rehearse

    done = compilation(model, None, wanted, model_options=definitions)
    return rehearse(done.program, optimizer=done.options.optimizer, groups=done.options.group), wanted.mesh


def formulas(name: str, given: Mapping[str, Any]) -> Formulas:
    """The symbolic memory, traffic and flops of a model or package."""
    from partc.api import compilation
    from partc.cost.formulas import formulas as of

    model, wanted, definitions = target(name, given)
    return of(compilation(model, None, wanted, model_options=definitions).program)


def place(mesh: Mesh, rank: int) -> int:
    """The coordinate of a rank on the pipeline axis. Raises PartcError P0004."""
    from partc.ir.mesh import PIPELINE_AXIS

    if not 0 <= rank < mesh.size:
        raise PartcError("P0004", f"--rank {rank} is out of range", help=f"give one from 0 to {mesh.size - 1}")
    return mesh.coordinate(rank).get(PIPELINE_AXIS, 0)
