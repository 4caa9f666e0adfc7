"""`partc plan`: the best way to spread a model over a cluster, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partc.cli import compile_options, console
from partc.errors import PartcError
from partc.ir.program import PRECISIONS

if TYPE_CHECKING:
    from partc.planner.planning import PlanChoice

MAX_SECONDS = 30.0  # of a search


@click.command("plan", short_help="Find the best mesh and options for MODEL on a cluster.")
@click.argument("model")
@compile_options.automatic_options
@click.option("-D", "definitions", metavar="NAME=VALUE", multiple=True, help="an option of the model file")
@click.option("--batch", type=int, help="the same as -D batch=..., for hf: models")
@click.option("--seq", type=int, help="the same as -D seq=..., for hf: models")
@click.option("--precision", type=click.Choice(PRECISIONS), default="bf16", show_default=True)
@click.option(
    "--kernels", type=click.Choice(("auto", "triton", "aten")), default="auto", show_default=True,
    help="auto is triton on GPUs, else aten",
)  # fmt: skip
@click.option(
    "--optimizer", metavar="NAME[:OPTION=VALUE,..]", help="the optimizer, whose states memory holds [default: adamw]"
)
@click.option("--top", type=int, default=5, show_default=True, metavar="N", help="plans to show")
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


def found(model: str, given: Mapping[str, Any], *, quiet: bool) -> PlanChoice:
    """The outcome of a search with a command's options."""
    if given["cluster"] is None:
        raise PartcError("P0816", "planning needs a cluster", help="add --cluster 8xH100-80GB or a FILE.toml")
    with console.working("planning", quiet=quiet):
        from partc.planner.planning import Planner, Request

        kept = ("precision", "kernels", "optimizer")
        wanted = {name: given[name] for name in (*compile_options.AUTOMATIC, *kept)}
        wanted |= {"fix": given["fix"] or "", "options": compile_options.definitions(given)}
        wanted["max_seconds"] = MAX_SECONDS if given["max_seconds"] is None else given["max_seconds"]
        return Planner(Request.checked(model, **wanted)).choice()


def automatic(
    model: str, given: Mapping[str, Any], context: click.Context, *, quiet: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a compile that the planner has decided, and the record of the choice, which is printed."""
    from partc.compilation.plan import check_undecided

    check_undecided(compile_options.commanded(context, given), given["cluster"])
    memory = given["memory"] or given["memory_limit"]
    choice = found(model, {**given, "memory": memory}, quiet=quiet)
    from partc.planner.automatic import decisions, record
    from partc.planner.reasons import binding
    from partc.reports.plan_choice import page

    best = choice.best.plan
    if not quiet:
        console.echo(page(choice, 1), nl=False)
        console.echo(binding(choice))
        console.echo(f"the same again: partc compile {model} {best.flags}\n")
    definitions = tuple(f"{name}={value}" for name, value in best.definitions.items())
    return {**decisions(best), "definitions": definitions, "batch": None, "seq": None}, record(choice)


def _write(text: str, path: Path) -> None:
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise PartcError("P0601", f"cannot write {path}: {error.strerror}", help="give another -o") from None
