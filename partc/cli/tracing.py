"""`partc trace`: a Chrome trace of measured steps together with the prediction, for Perfetto."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partc.cli import compile_options, console
from partc.cli.paths import PATH
from partc.errors import PartcError
from partc.runtime.documents import Malformed, contents

if TYPE_CHECKING:
    from partc.cost.forecast import Forecast
    from partc.package.recorded_steps import Measured


@click.command("trace", short_help="What the ranks did in a step, next to the prediction.")
@click.argument("directory", metavar="DIR", type=PATH)
@click.option("-o", "--output", type=PATH, metavar="FILE", help="DIR/trace.json, or DIR-trace.json for a package")
@click.option("--package", type=PATH, metavar="DIR", help="that the trace is of: adds the prediction")
@click.option("--cluster", "spec", metavar="SPEC", help="the prediction's hardware: 16x8xA100-80GB, FILE.toml [H100s]")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")
def trace_command(directory: Path, output: Path | None, package: Path | None, spec: str | None, as_json: bool) -> None:
    """Make a Chrome trace of the folder that `train.py --trace DIR` wrote, for ui.perfetto.dev.

    Every rank is a process with its actions, collectives and transfers; with --package, the prediction for each
    pipeline rank is above it. If DIR is a package, the trace only has the prediction.
    """
    from partc.ir.mesh import Mesh
    from partc.package.launch import read_plan
    from partc.package.output import write_page

    if not directory.is_dir():
        raise PartcError("P0607", f"there is no folder {directory}", help="name one that train.py --trace wrote")
    alone = (directory / "plan.json").exists()
    if alone and package is not None:
        raise PartcError("P0608", f"{directory} is a package itself", help="leave --package out")
    if spec is not None and not alone and package is None:
        raise PartcError("P0608", "--cluster is for predictions", help="add --package DIR")
    with console.progress_spinner("reading and predicting", quiet=as_json):
        from partc.package.recorded_steps import read_trace
        from partc.reports import chrome_trace

        measured = None if alone else read_trace(directory)
        root, missing = (directory, "") if measured is None else _package_of(measured, package)
        mesh = None if root is None else Mesh.parse(read_plan(root)["mesh"])
        forecast = None if root is None else _forecast(root, spec)
        if forecast is not None and measured is not None and mesh is not None:
            forecast = chrome_trace.calibrated(forecast, measured, mesh)
        text = chrome_trace.document(forecast, measured, mesh)
    path = output or (directory.with_name(f"{directory.name}-trace.json") if alone else directory / "trace.json")
    write_page(text, path, mark='"producer": "partc"', option="-o")
    if as_json:
        print(json.dumps({"path": str(path), **json.loads(text)["otherData"]}))
        return
    _print_table(measured, forecast)
    for line in (
        missing,
        "" if forecast is None else f"the prediction: {chrome_trace.basis_sentence(forecast, measured)}",
    ):
        if line:
            console.echo(line)
    console.echo(f"wrote {path}")
    console.next_step(f"open {path} in https://ui.perfetto.dev")


def _package_of(measured: Measured, given: Path | None) -> tuple[Path | None, str]:
    """The package for the prediction, or the reason why there is none. Raises PartcError P0608 for another package.

    A prediction runs the package's model file. For safety, only a package named by the user is used, never one named in
    a file.
    """
    from partc.ir.mesh import Mesh
    from partc.package.launch import read_plan

    if given is None:
        return None, f"no prediction: --package DIR adds it; the run was of {measured.package!r}"
    try:
        digest = hashlib.sha256(contents(given / "plan.json")).hexdigest()
    except Malformed:
        digest = ""
    mesh = Mesh.parse(read_plan(given)["mesh"]) if digest == measured.plan else None
    if mesh is None or mesh.size != len(measured.ranks) or not measured.axes <= set(mesh.names):
        cause = f"{given} is not the package that the trace was made with"
        raise PartcError("P0608", cause, help="compile it again as it was, or leave --package out")
    return given, ""


def _forecast(root: Path, spec: str | None) -> Forecast:
    from partc.api import compilation
    from partc.cost.forecast import Forecast
    from partc.cost.rates import ROOFLINE

    unset: dict[str, Any] = {"mesh": None, "virtual_stages": None, "definitions": (), "batch": None, "seq": None}
    model, options, definitions = compile_options.target(str(root), unset)
    program = compilation(model, None, options, model_options=definitions).program
    if spec is None:
        return Forecast(program, ROOFLINE)
    from partc.cluster.cluster import fitted
    from partc.cluster.files import cluster_of
    from partc.cost.calibration import calibration
    from partc.cost.rates import ClusterRates

    cluster = fitted(cluster_of(spec), program.mesh.size)
    return Forecast(program, ClusterRates(cluster, calibration(cluster)))


def _print_table(measured: Measured | None, forecast: Forecast | None) -> None:
    from partc.reports import chrome_trace

    rows = [("measured", measured.split)] if measured is not None else []
    rows += [("predicted", chrome_trace.predicted_split(forecast))] if forecast is not None else []
    names = ("step", *(name.replace("_", " ") for name in rows[0][1][1]._fields))
    console.echo(f"{'':<10}{''.join(f'{name:>24}' for name in names)}")
    for name, (seconds, parts) in rows:
        console.echo(f"{name:<10}{''.join(f'{value * 1e3:>21.3f} ms' for value in (seconds, *parts))}")
