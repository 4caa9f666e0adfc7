"""`partc plan`: the best way to spread a model over a cluster, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partc.cli import compile_options, console
from partc.errors import PartcError
from partc.ir.program import PRECISIONS

if TYPE_CHECKING:
    from partc.planner.planning import PlanChoice, Request


@click.command("plan", short_help="Find the best mesh and options for MODEL on a cluster.")
@click.argument("model")
@click.option(
    "--cluster", "spec", required=True, metavar="SPEC", help="8xH100-80GB, 16x8xA100-80GB, 4xCPU or FILE.toml"
)
@click.option("--ranks", type=int, metavar="N", help="ranks to use [default: all devices of the cluster]")
@click.option("-D", "definitions", metavar="NAME=VALUE", multiple=True, help="an option of the model file")
@click.option("--batch", type=int, help="the same as -D batch=..., for hf: models")
@click.option("--seq", type=int, help="the same as -D seq=..., for hf: models")
@click.option(
    "--global-batch", metavar="SAMPLES|TOKENS", help="the batch of a step: 512, '4M tokens', 4Mtok; M is 2^20"
)
@click.option("--memory", metavar="BYTES", help="memory of a rank [default: the device's]")
@click.option("--precision", type=click.Choice(PRECISIONS), default="bf16", show_default=True)
@click.option(
    "--kernels", type=click.Choice(("auto", "triton", "aten")), default="auto", show_default=True,
    help="auto is triton on GPUs, else aten",
)  # fmt: skip
@click.option("--fix", default="", metavar="NAME=VALUE|..,..", help="decide something yourself: 'tp=4|8,zero=1'")
@click.option("--top", type=int, default=5, show_default=True, metavar="N", help="plans to show")
@click.option(
    "--max-seconds",
    type=float,
    default=30.0,
    show_default=True,
    metavar="S",
    help="stop then, with the best plan so far and its gap",
)
@click.option("-o", "--output", type=Path, metavar="FILE", help="write the best plan, for partc compile --plan FILE")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")
def plan_command(model: str, top: int, output: Path | None, as_json: bool, **given: Any) -> None:
    """Find the quickest plan for MODEL that fits the memory of a cluster's devices.

    A plan is a mesh with the order of its axes on the links, microbatches, a pipeline schedule, a ZeRO level and
    recomputation. Lower bounds prove that no other plan of the space is quicker by more than the gap that is printed.
    """
    from partc.planner.reasons import binding, document
    from partc.reports.plan_choice import page

    if top < 1:
        raise PartcError("P0004", f"--top {top} is out of range", help="give 1 or more")
    choice = found(model, given, quiet=as_json)
    best = choice.best
    if output is not None:
        _write(best.plan.text, output)
    if as_json:
        print(json.dumps(document(choice, top)))
        return
    console.echo(page(choice, top), nl=False)
    console.echo(binding(choice))
    console.next_step(
        f"partc compile {model} --plan {output}" if output is not None else f"partc compile {model} {best.plan.flags}"
    )


def found(model: str, given: dict[str, Any], *, quiet: bool) -> PlanChoice:
    """The outcome of a search with a command's options."""
    wanted = _request(model, given)
    with console.working("planning", quiet=quiet):
        from partc.planner.planning import Planner

        return Planner(wanted).choice()


def _request(model: str, given: dict[str, Any]) -> Request:
    from partc.cluster.files import cluster_of
    from partc.cost.saved_tensors import parse_bytes
    from partc.planner.planning import Request
    from partc.planner.space import fixed

    cluster = cluster_of(given["spec"])
    ranks = cluster.size if given["ranks"] is None else given["ranks"]
    if ranks < 1:
        raise PartcError("P0004", f"--ranks {ranks} is out of range", help="give 1 or more")
    limit = cluster.device.memory if given["memory"] is None else parse_bytes(given["memory"])
    if not limit:
        raise PartcError("P0004", f"--memory {given['memory']} is no size", help="for example 80GB or 64GiB")
    if given["max_seconds"] is not None and not given["max_seconds"] > 0:
        raise PartcError("P0004", f"--max-seconds {given['max_seconds']} is out of range", help="give more than 0")
    return Request(
        model=model,
        cluster=cluster,
        ranks=ranks,
        limit=limit,
        options=compile_options.definitions(given),
        global_batch=given["global_batch"],
        fixed=fixed(given["fix"]),
        precision=given["precision"],
        kernels=given["kernels"],
        max_seconds=given["max_seconds"],
    )


def _write(text: str, path: Path) -> None:
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise PartcError("P0601", f"cannot write {path}: {error.strerror}", help="give another -o") from None
