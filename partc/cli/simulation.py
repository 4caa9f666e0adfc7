"""`partc cluster` and `partc simulate`: clusters, and predictions of plans on them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from partc.cli import console
from partc.errors import PartcError


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
@click.option("-o", "--output", type=Path, required=True, metavar="FILE.toml", help="the cluster's file")
@click.option("--processes", type=int, default=2, show_default=True, help="processes that work at one time")
def measure_command(output: Path, processes: int) -> None:
    """Measure the rates of processes on this machine's processors, and write them as a cluster: under a minute.

    Matrix products by type, memory's bandwidth, an operation's launch, and sums over gloo by size.
    """
    from partc.cluster.measurement import MARK, measured
    from partc.package.output import write_page

    if not 1 <= processes <= 64:
        raise PartcError("P0004", f"--processes {processes} is out of range", help="give 1 to 64")
    with console.working("measuring", quiet=False):
        rates = measured(processes)
    write_page(rates.toml(), output, mark=MARK, option="-o")
    console.echo(rates.toml(), nl=False)
    console.next_step(f"partc cluster show {output}")


@click.command("simulate", short_help="Predict the steps of MODEL under many plans.")
@click.argument("model")
@click.option(
    "--cluster", "spec", required=True, metavar="SPEC", help="8xH100-80GB, 16x8xA100-80GB, 4xCPU or FILE.toml"
)
@click.option("--plans", type=Path, required=True, metavar="FILE.jsonl", help="one plan a line, as JSON")
@click.option("--calibration", "constants", type=Path, metavar="FILE.toml", help="constants of the cost model")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")
def simulate_command(model: str, spec: str, plans: Path, constants: Path | None, as_json: bool) -> None:
    """Predict step time and memory of MODEL under each plan of a file.

    \b
    A plan is a line such as
      {"mesh": "pp=2,dp=4,tp=8", "microbatches": 8, "schedule": "1f1b",
       "virtual_stages": 1, "zero": 1, "recompute": "none",
       "precision": "bf16", "kernels": "auto", "options": {"batch": 64}}
    All but the mesh may be left out; `options` are those of the model file.
    """
    from partc.cluster.files import cluster_of
    from partc.cost.calibration import calibration, read

    cluster = cluster_of(spec)
    known = calibration(cluster)
    if constants is not None:
        known = read(constants, known)
    with console.working("simulating", quiet=as_json):
        from partc.compilation.simulation import Simulator, predictions, read_plans

        wanted = list(read_plans(plans))
        if not wanted:
            raise PartcError("P0804", f"{plans} has no plan", help="one JSON object a line")
        found = list(predictions(Simulator(model, cluster, known), wanted))
    if as_json:
        print(json.dumps({"plans": found}))
        return
    from partc.reports.plan_table import table

    console.echo(table([str(getattr(plan, "mesh", "")) for plan in wanted], found), nl=False)
