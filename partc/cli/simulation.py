"""`partc cluster` and `partc simulate`: clusters, and predictions of plans on them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from partc.cli import console
from partc.cli.paths import PATH
from partc.errors import PartcError

if TYPE_CHECKING:
    from partc.ir.program import Program


@click.group("cluster", short_help="Show a cluster's devices and links.")
def cluster_command() -> None:
    """Clusters: 8xH100-80GB, 16x8xA100-80GB (nodes x devices), 4xCPU, or a TOML file."""


@cluster_command.command("show", short_help="Show a cluster's devices and links.")
@click.argument("spec")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")
def show_command(spec: str, as_json: bool) -> None:
    """Show the devices and links of cluster SPEC, and the constants of their cost model."""
    from partc.cluster.files import cluster_of, document
    from partc.cost.calibration import calibration
    from partc.reports.cluster_table import page

    cluster = cluster_of(spec)
    constants = calibration(cluster)
    if as_json:
        print(json.dumps(document(cluster) | {"calibration": dataclasses.asdict(constants)}))
        return
    console.echo(page(cluster, constants), nl=False)


@cluster_command.command("measure", short_help="Measure this machine's processes.")
@click.option("-o", "--output", type=PATH, required=True, metavar="FILE.toml", help="the cluster's file")
@click.option("--processes", type=int, default=2, show_default=True, help="processes that work concurrently on a node")
@click.option("--nodes", type=int, default=1, show_default=True, help="nodes, on each of which the command is started")
@click.option("--node-rank", type=int, default=0, metavar="N", help="the number of this node, from 0")
@click.option("--master", default="", metavar="HOST:PORT", help="node 0 and a free port of it, with several nodes")
@click.option("--page", type=PATH, metavar="FILE.html", help="a picture of the measured durations and their lines")
def measure_command(output: Path, processes: int, nodes: int, node_rank: int, master: str, page: Path | None) -> None:
    """Measure the rates of CPU processes and write them as a cluster file; takes about a minute.

    \b
    Matrix products by type, memory's bandwidth, an operation's launch; messages
    inside nodes and between them by size and distance; the cost of overlap.

    \b
    With several nodes, start it on each of them at the same time, like torchrun:
      partc cluster measure -o mine.toml --nodes 2 --node-rank 1 --master 10.0.0.1:29400
    """
    from partc.cluster.measurement import MARK, measured_rates
    from partc.package.output import write_page

    if not 1 <= processes <= 64:
        raise PartcError("P0004", f"--processes {processes} is out of range", help="give 1 to 64")
    if not 1 <= nodes <= 4096 or not 0 <= node_rank < nodes:
        raise PartcError(
            "P0004", f"--node-rank {node_rank} is out of range for {nodes} nodes", help="number nodes from 0"
        )
    if nodes > 1 and not re.fullmatch(r".+:\d{1,5}", master):
        raise PartcError(
            "P0004", f"--master {master!r} is not HOST:PORT", help="give the address of node 0, and a port"
        )
    with console.progress_spinner("measuring", quiet=False):
        rates = measured_rates(processes, nodes=nodes, node=node_rank, master=master)
    write_page(rates.toml(), output, mark=MARK, option="-o")
    if page is not None:
        from partc.reports import measurement_page

        write_page(measurement_page.page(rates), page, option="--page")
    console.echo(rates.toml(), nl=False)
    console.next_step(console.command("partc", "cluster", "show", output))


@cluster_command.command("fit", short_help="Correct a cluster's constants from measured runs.")
@click.argument("runs", type=PATH, nargs=-1, required=True)
@click.option("--cluster", "spec", required=True, metavar="SPEC", help="the cluster on which the runs were measured")
@click.option("--calibration", "constants", type=PATH, metavar="FILE.toml", help="constants to start from")
@click.option("-o", "--output", type=PATH, required=True, metavar="FILE.toml", help="the constants' file")
def fit_command(runs: tuple[Path, ...], spec: str, constants: Path | None, output: Path) -> None:
    """Fit the constants of the cost model so that predictions come close to RUNS.

    \b
    A run is FILE.jsonl from `--metrics` of the package in folder FILE next to it,
    or a file of plans as `partc simulate` reads them, each with its "model" and
    its measured "step_seconds". `--calibration` of other commands reads the result.
    """
    from partc.cluster.files import cluster_of
    from partc.compilation.fitted_constants import MARK, fit, read_runs, toml
    from partc.cost.calibration import calibration, read
    from partc.package.output import write_page

    cluster = cluster_of(spec)
    start = calibration(cluster)
    if constants is not None:
        start = read(constants, start)
    with console.progress_spinner("fitting", quiet=False):
        found = list(read_runs(runs, cluster, start, _program_of))
        result = fit(found, cluster, start)
    width = max(len(run.name) for run in found)
    console.echo(f"{'run':<{width}}  {'measured':>11}  before   after")
    for run, before, after in zip(found, result.before, result.after, strict=True):
        console.echo(f"{run.name:<{width}}  {run.seconds * 1e3:>8.1f} ms {before:>+7.1%} {after:>+7.1%}")
    means = (sum(map(abs, errors)) / len(errors) for errors in (result.before, result.after))
    console.echo(f"{'mean error':<{width}}  {'':>11} {' '.join(f'{mean:>7.1%}' for mean in means)}")
    write_page(toml(result.constants), output, mark=MARK, option="-o")
    console.echo(toml(result.constants), nl=False)
    given = ("--cluster", spec, "--calibration", output, "--plans", "FILE.jsonl")
    console.next_step(console.command("partc", "simulate", "MODEL", *given))


def _program_of(package: Path) -> Program:
    """The program of a package, compiled again from its model file."""
    from partc.api import compilation
    from partc.cli import compile_options

    unset = {"mesh": None, "virtual_stages": None, "definitions": (), "batch": None, "seq": None}
    model, options, definitions = compile_options.target(str(package), unset)
    return compilation(model, None, options, model_options=definitions).program


@click.command("simulate", short_help="Predict the steps of MODEL under many plans.")
@click.argument("model")
@click.option(
    "--cluster", "spec", required=True, metavar="SPEC", help="8xH100-80GB, 16x8xA100-80GB, 4xCPU or FILE.toml"
)
@click.option("--plans", type=PATH, required=True, metavar="FILE.jsonl", help="one plan a line, as JSON")
@click.option("--calibration", "constants", type=PATH, metavar="FILE.toml", help="constants of the cost model")
@click.option("--scale", is_flag=True, help="throughput as a share of that of as many single devices")
@click.option(
    "--failures",
    "failing",
    metavar="LIST",
    help="the time of a step under failures: mtbf=50000,checkpoint=60,restart=600",
)
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")
def simulate_command(
    model: str, spec: str, plans: Path, constants: Path | None, scale: bool, failing: str | None, as_json: bool
) -> None:
    """Predict step time and memory of MODEL under each plan of a file.

    \b
    A plan is a line such as
      {"mesh": "pp=2,dp=4,tp=8", "microbatches": 8, "schedule": "1f1b",
       "virtual_stages": 1, "zero": 1, "recompute": "none",
       "precision": "bf16", "kernels": "auto", "options": {"batch": 64}}
    Only the mesh is required; `options` are those of the model file.

    \b --failures takes mtbf (hours between two failures of one device), and the seconds checkpoint, restart and
    interval (of work between checkpoints; by default the best one).
    """
    from partc.cluster.files import cluster_of
    from partc.cost.calibration import calibration, read
    from partc.cost.failures import Failures

    cluster = cluster_of(spec)
    known = calibration(cluster)
    failures = None if failing is None else Failures.parse(failing)
    if constants is not None:
        known = read(constants, known)
    with console.progress_spinner("simulating", quiet=as_json):
        from partc.compilation.simulation import Simulator, predictions, read_plans

        wanted = list(read_plans(plans))
        if not wanted:
            raise PartcError("P0804", f"{plans} has no plan", help="one JSON object a line")
        found = list(predictions(Simulator(model, cluster, known), wanted, scale=scale, failures=failures))
    if as_json:
        print(json.dumps({"plans": found}))
        return
    from partc.reports.plan_table import table

    console.echo(table([str(getattr(plan, "mesh", "")) for plan in wanted], found), nl=False)
