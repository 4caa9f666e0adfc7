"""What the command line asks for: the options of a compile, and a model's or a package's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from partc.errors import PartcError
from partc.program import PRECISIONS
from partc.schedules import SCHEDULES

if TYPE_CHECKING:
    from partc.formulas import Formulas
    from partc.memory import Account
    from partc.mesh import Mesh
    from partc.options import Options


_KEPT = (
    "mesh", "microbatches", "schedule", "virtual_stages", "precision", "seed", "shard", "zero", "recompute", "casts",
    "kernels", "bucket", "nodes", "grad_reduce", "compress_grads", "loss_chunks",
    "cuda_graphs",
)  # fmt: skip


# What a package's plan leaves out where nobody asked for it.
_DEFAULTS = {
    "schedule": "1f1b", "shard": (), "zero": "0", "recompute": "none", "casts": (), "kernels": "aten", "bucket": "25MB",
    "nodes": None, "grad_reduce": "fp32", "compress_grads": "none",
    "loss_chunks": 1, "cuda_graphs": False,
}  # fmt: skip


def options(given: Mapping[str, Any]) -> tuple[Options, dict[str, str]]:
    """The checked options of a compile, and those for the model file."""
    from partc.options import Options

    definitions: dict[str, str] = {}
    for text in given["definitions"]:
        name, found, value = text.partition("=")
        if not found or not name.isidentifier():
            raise PartcError("P0003", f"-D {text!r} is not NAME=VALUE", help="for example -D layers=4")
        _define(definitions, name, value)
    for name in ("batch", "seq"):
        if given[name] is not None:
            if given[name] < 1:
                raise PartcError("P0004", f"--{name} {given[name]} is out of range", help="give 1 or more")
            _define(definitions, name, str(given[name]))
    limit = given.get("memory_limit")
    return Options.checked(memory_limit=limit, **{name: given[name] for name in _KEPT}), definitions


def _define(definitions: dict[str, str], name: str, value: str) -> None:
    if name in definitions:
        raise PartcError("P0003", f"option {name!r} is given twice", help="give it one value")
    definitions[name] = value


def target(name: str, given: Mapping[str, Any]) -> tuple[str, Options, dict[str, str]]:
    """What to compile again: a model with these options, or a package with its own."""
    if Path(name).is_dir():
        from partc.launch import read_plan
        from partc.options import TABLE

        plan = read_plan(Path(name))
        if given["mesh"] is not None or given["definitions"]:
            raise PartcError(
                "P0603", f"{name} is a package, with a mesh and options of its own", help="inspect its model file"
            )
        kept = {name: plan[name] for name in ("mesh", "microbatches", "precision", "seed")}
        command = _DEFAULTS | {name: value for name, value in plan["command"].items() if name in _KEPT}
        if command["schedule"] == TABLE:
            command["schedule"] = str(Path(name) / TABLE)
        definitions = [f"{name}={value}" for name, value in plan["options"].items()]
        wanted, found = options({**given, **kept, **command, "definitions": definitions})
        return str(Path(name) / "model.py"), wanted, found
    if given["mesh"] is None:
        raise PartcError("P0603", "inspecting a model needs a mesh", help="add --mesh SPEC, for example --mesh 2x2x2")
    wanted, found = options(given)
    return name, wanted, found


Command = TypeVar("Command", bound=Callable[..., Any])


def compile_options(required: bool) -> Callable[[Command], Command]:
    """The options that decide a compile, for each command that does one."""
    options = [
        click.option(
            "--mesh", metavar="SPEC", required=required, help="sizes of the axes: 8, 4x8, 2x4x8 or pp=2,dp=4,tp=8"
        ),
        click.option("-D", "definitions", metavar="NAME=VALUE", multiple=True, help="an option of the model file"),
        click.option("--batch", type=int, help="the same as -D batch=..., for hf: models"),
        click.option("--seq", type=int, help="the same as -D seq=..., for hf: models"),
        click.option("--microbatches", type=int, default=1, show_default=True, help="parts of the batch in time"),
        click.option(
            "--schedule",
            metavar="NAME|FILE.csv",
            default="1f1b",
            show_default=True,
            help=f"{', '.join(SCHEDULES)}, or a table of actions",
        ),
        click.option(
            "--virtual-stages", type=int, metavar="N", help="stages on each rank, for interleaved [default: 2]"
        ),
        click.option("--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True),
        click.option(
            "--cast", "casts", metavar="OP=TYPE", multiple=True, help="with bf16 or fp16: softmax=fp32, add=any"
        ),
        click.option("--seed", type=int, default=0, show_default=True, help="of the initial parameters and the data"),
        click.option(
            "--zero",
            metavar="0|1|2|3[@AXES]",
            default="0",
            show_default=True,
            help="what dp ranks hold in parts: optimizer state (1), gradients too (2), parameters too (3)",
        ),
        click.option(
            "--recompute",
            metavar="none|selective|full|OPS|BYTES",
            default="none",
            show_default=True,
            help="what backward makes again: nothing; what is large and quickly made; all but regions' inputs; "
            "operations by name (softmax,all_gather); or what must be, so that a rank holds no more than 18GB",
        ),
        click.option(
            "--loss-chunks",
            type=int,
            default=1,
            show_default=True,
            metavar="N",
            help="make logits in so many parts, of which one is in memory at a time, and again for backward",
        ),
        click.option(
            "--kernels",
            type=click.Choice(("auto", "triton", "aten", "inductor")),
            default="auto",
            show_default=True,
            help="Triton's, fused where one pass over memory does, PyTorch's own, or what torch.compile makes of "
            "regions; auto is Triton's where a GPU is",
        ),
        click.option(
            "--bucket",
            metavar="BYTES",
            default="25MB",
            show_default=True,
            help="gradients that are summed over ranks together, while backward goes on",
        ),
        click.option(
            "--nodes", type=int, metavar="N", help="ranks that share a node: sums go inside nodes, then across"
        ),
        click.option(
            "--grad-reduce",
            type=click.Choice(("fp32", "bf16")),
            default="fp32",
            show_default=True,
            help="what gradients are summed over ranks in",
        ),
        click.option(
            "--compress-grads",
            type=click.Choice(("none", "bf16", "int8")),
            default="none",
            show_default=True,
            help="what gradients cross nodes in (all ranks, without --nodes), with error feedback",
        ),
        click.option(
            "--cuda-graphs",
            is_flag=True,
            help="train.py records what a GPU does in a step and repeats it; an error where that cannot be",
        ),
        click.option("--shard", metavar="GLOB=LAYOUT", multiple=True, help="pin a layout: '*.wq.weight=[@tp, _]'"),
    ]

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def memory(name: str, given: Mapping[str, Any], optimizer: str | None) -> tuple[Account, Mesh]:
    """What a package's plan says of its ranks' memory, or a model's account; and the mesh."""
    from partc.mesh import Mesh

    if Path(name).is_dir() and optimizer in (None, "adamw"):
        from partc.launch import read_plan
        from partc.memory import Account

        plan = read_plan(Path(name))
        if given["mesh"] is not None or given["definitions"]:
            raise PartcError(
                "P0603", f"{name} is a package, with a mesh and options of its own", help="name its model file"
            )
        return Account.of(plan.get("memory")), Mesh.parse(plan["mesh"])
    model, wanted, definitions = target(name, given)
    from partc.api import compilation
    from partc.rehearsal import rehearse

    program = compilation(model, None, wanted, model_options=definitions).program
    return rehearse(program, optimizer=optimizer or "adamw"), wanted.mesh


def formulas(name: str, given: Mapping[str, Any]) -> Formulas:
    """What a model's calls, or a package's, hold and move, in the names of their sizes."""
    from partc.api import compilation
    from partc.formulas import formulas as of

    model, wanted, definitions = target(name, given)
    return of(compilation(model, None, wanted, model_options=definitions).program)


def place(mesh: Mesh, rank: int) -> int:
    """The coordinate of a rank on the pipeline axis. Raises PartcError P0004."""
    from partc.mesh import PIPELINE_AXIS

    if not 0 <= rank < mesh.size:
        raise PartcError("P0004", f"--rank {rank} is out of range", help=f"give one from 0 to {mesh.size - 1}")
    return mesh.coordinate(rank).get(PIPELINE_AXIS, 0)
