"""`partc plan`: the best way to spread a model over a cluster, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from partc.cli import compile_options, console
from partc.cli.compile_report import print_report
from partc.cli.paths import PATH
from partc.errors import PartcError
from partc.ir.program import PRECISIONS

if TYPE_CHECKING:
    from partc.planner.planning import PlanChoice, Planner
    from partc.planner.search import Played
    from partc.planner.variations import Variation

MAX_SECONDS = 30.0  # the default limit of a search


@click.command("plan", short_help="Find the best mesh and options for MODEL on a cluster.")
@click.argument("model")
@compile_options.automatic_options()
@click.option("-D", "definitions", metavar="NAME=VALUE", multiple=True, help="an option of the model file")
@click.option("--batch", type=int, help="the same as -D batch=..., for hf: models")
@click.option("--seq", type=int, help="the same as -D seq=..., for hf: models")
@click.option("--precision", type=click.Choice(PRECISIONS), default="bf16", show_default=True)
@click.option(
    "--kernels", type=click.Choice(("auto", "triton", "aten")), default="auto", show_default=True,
    help="auto is triton on GPUs, else aten",
)  # fmt: skip
@click.option("--cuda-graphs", is_flag=True, help="only plans whose steps GPUs can replay, without pp and ep")
@click.option(
    "--optimizer", metavar="NAME[:OPTION=VALUE,..]", help="the optimizer, whose states memory holds [default: adamw]"
)
@click.option("--top", type=int, default=5, show_default=True, metavar="N", help="plans to show")
@click.option(
    "--what-if",
    is_flag=True,
    help="also find the best plans with more memory, CUDA graphs, other ranks and batches, in half the time",
)
@click.option(
    "--page", "page_path", type=PATH, metavar="FILE.html", help="write a page with pictures; implies --what-if"
)
@click.option("-o", "--output", type=PATH, metavar="FILE", help="write the best plan, for partc compile --plan FILE")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")
def plan_command(
    model: str,
    top: int,
    what_if: bool,
    page_path: Path | None,
    output: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Find the quickest plan for MODEL that fits the memory of a cluster's devices.

    A plan is a mesh with the order of its axes on the links, microbatches, a pipeline schedule, a ZeRO level and
    recomputation. Lower bounds prove that no other plan of the space is quicker by more than the gap that is printed.
    """
    from partc.package.output import write_page
    from partc.planner.reasons import binding_constraint, by_layer, document
    from partc.reports.plan_choice import page, variation_table

    if top < 1:
        raise PartcError("P0004", f"--top {top} is out of range", help="give 1 or more")
    _check_targets(output, page_path)
    with console.progress_spinner("planning", quiet=as_json):
        answer = choose_plan(model, given, what_if=what_if or page_path is not None, pictured=page_path is not None)
    choice = answer.choice
    best = choice.best
    if output is not None:
        write_page(f"{best.plan.text}\n", output, mark="", option="-o")
    if page_path is not None:
        from partc.reports.plan_page import page as pictures

        write_page(pictures(answer.planner, choice, top, answer.variations, answer.front), page_path, option="--page")
    if as_json:
        print(json.dumps(document(choice, top, answer.variations)))
        return
    console.echo(page(choice, top), nl=False)
    console.echo(binding_constraint(choice, answer.variations))
    if said := by_layer(choice):
        console.echo(f"by layer: {said}")
    if answer.variations:
        console.echo(f"\n{variation_table(choice, answer.variations)}", nl=False)
    options = best.plan.flags if output is None else console.command("--plan", output)
    console.next_step(f"{console.command('partc', 'compile', model)} {options}")


@click.command("replan", short_help="Plan a package's training anew, for another cluster.")
@click.argument("directory", metavar="BUILD", type=PATH)
@compile_options.automatic_options(batch=False)
@click.option(
    "--checkpoint", type=PATH, metavar="CKPT", help="the training to continue: a checkpoint, or the folder of --save"
)
@click.option("-o", "--output", type=PATH, required=True, metavar="DIR", help="folder of the new package")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")
def replan_command(directory: Path, checkpoint: Path | None, output: Path, as_json: bool, **given: Any) -> None:
    """Plan the training of package BUILD for another cluster, and write a package that continues it.

    Model, options, global batch, precision, seed and optimizer stay; mesh, microbatches, schedule, ZeRO and
    recomputation are chosen anew. The new package resumes the checkpoint, with the optimizer's state and the position
    of the data.
    """
    from partc.package.output import check_target
    from partc.planner.automatic import decisions, record
    from partc.planner.replanning import checkpoint_to_continue, data_of, nodes_of, planner_of, request_of

    check_cluster(given["cluster"])
    check_target(output)
    if output.resolve() == directory.resolve():
        raise PartcError("P0601", f"{output} is the package that is replanned", help="name another folder with -o")
    source = None
    if checkpoint is not None:
        source = checkpoint_to_continue(directory, checkpoint, lambda line: console.echo(line, err=True))
    with console.progress_spinner("planning", quiet=as_json):
        from partc.planner.variations import required_choice

        request = request_of(directory, checkpoint=source, **search_options(given))
        choice = required_choice(planner_of(directory, request))
    best = choice.best.plan
    if not as_json:
        _print_choice(choice)
    nodes = nodes_of(directory, best, choice.request.cluster)
    model, options, definitions = compile_options.of_package(
        directory, {**decisions(best), "nodes": nodes, "cuda_graphs": best.cuda_graphs}
    )
    with console.Phases(quiet=as_json) as phases:
        from partc.api import compilation, package

        done = compilation(model, None, options, model_options=definitions, on_phase=phases.ended)
        done = replace(done, extra={**done.extra, **data_of(directory)})
        compiled = package(done, planned=record(choice), on_phase=phases.ended)
        compiled.write(output, on_phase=phases.ended)
    at = 0 if source is None else source.step
    report = compiled.report | {"phases": phases.seconds, "planned": record(choice), "step": at}
    if as_json:
        print(json.dumps(report))
        return
    print_report(report)
    if source is None:
        console.next_step(console.command("partc", "run", output))
        return
    console.echo(f"{source.path} fits, after step {at}")
    console.next_step(console.command("partc", "run", output, "--steps", at + 10, "--resume", checkpoint))


class Answer(NamedTuple):
    """The choice of a search, and the choices for its what-if variations."""

    planner: Planner
    choice: PlanChoice
    variations: tuple[Variation, ...] = ()
    front: tuple[Played, ...] = ()


def choose_plan(model: str, given: Mapping[str, Any], *, what_if: bool = False, pictured: bool = False) -> Answer:
    """The answer to a command's options; the what-if searches take half of the time."""
    check_cluster(given["cluster"])
    from partc.compilation.plan import GIVEN_TO_SEARCH
    from partc.planner.planning import Planner, Request
    from partc.planner.variations import front, required_choice, variations

    kept = {name: given[name] for name in GIVEN_TO_SEARCH if name in given}
    wanted = search_options(given)
    seconds = wanted["max_seconds"] / 2 if what_if else wanted["max_seconds"]
    options = compile_options.definitions(given)
    planner = Planner(Request.checked(model, **{**wanted, "max_seconds": seconds}, **kept, options=options))
    choice = required_choice(planner)
    if not what_if:
        return Answer(planner, choice)
    found = variations(planner, choice, seconds / 2 if pictured else seconds)
    return Answer(planner, choice, found, front(planner, choice, seconds / 2) if pictured else ())


def check_cluster(spec: str | None) -> None:
    """Raise PartcError P0816 without a cluster."""
    if spec is None:
        raise PartcError("P0816", "planning needs a cluster", help="add --cluster 8xH100-80GB or a FILE.toml")


def search_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a search, with their defaults."""
    found = {name: given[name] for name in compile_options.AUTOMATIC if name in given}
    seconds = MAX_SECONDS if given["max_seconds"] is None else given["max_seconds"]
    return {**found, "fix": given["fix"] or "", "per_layer": bool(given["per_layer"]), "max_seconds": seconds}


def plan_automatically(
    model: str, given: Mapping[str, Any], context: click.Context, *, quiet: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plan, and print the choice; returns the compile options that the planner has decided, and the record of the
    choice.
    """
    from partc.compilation.plan import check_undecided

    check_undecided(compile_options.options_on_command_line(context, given), given["cluster"])
    memory = given["memory"] or given["memory_limit"]
    with console.progress_spinner("planning", quiet=quiet):
        choice = choose_plan(model, {**given, "memory": memory}).choice
    from partc.planner.automatic import decisions, record

    best = choice.best.plan
    if not quiet:
        _print_choice(choice)
        console.echo(f"the same again: {console.command('partc', 'compile', model)} {best.flags}\n")
    definitions = tuple(f"{name}={value}" for name, value in best.definitions.items())
    return {**decisions(best), "definitions": definitions, "batch": None, "seq": None}, record(choice)


def _print_choice(choice: PlanChoice) -> None:
    """Print the best plan, the proof's figures and the constraint that binds."""
    from partc.planner.reasons import binding_constraint
    from partc.reports.plan_choice import page

    console.echo(page(choice, 1), nl=False)
    console.echo(binding_constraint(choice))


def _check_targets(output: Path | None, page: Path | None) -> None:
    """Check before a search that its files can be written. Raises PartcError P0601 and P0602."""
    from partc.compilation.plan import read

    for option, path in (("-o", output), ("--page", page)):
        if path is not None and not path.absolute().parent.is_dir():
            cause = f"{path} cannot be written: there is no folder {path.parent}"
            raise PartcError("P0602", cause, help=f"name another with {option}")
    if output is not None and output.exists():
        try:
            read(output)
        except PartcError:
            raise PartcError("P0601", f"{output} exists and is not a plan", help="name another with -o") from None
