"""The command line. Slow imports wait until a command needs them."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partc import __version__
from partc.cli import compile_options, console
from partc.cli.compile_report import print_report
from partc.cli.paths import PATH
from partc.cli.planning import plan_command, replan_command
from partc.cli.simulation import cluster_command, simulate_command
from partc.cli.tracing import trace_command
from partc.errors import PartcError
from partc.garbage_collection import rare_collections

if TYPE_CHECKING:
    from partc.api import Compilation
    from partc.compilation.options import Options

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 a check did not hold, 2 the input is wrong, 70 a bug in
    partc.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    with rare_collections():
        return console.guarded(
            lambda: cli(args=given, prog_name="partc", standalone_mode=False), json="--json" in given
        )


@click.group(context_settings=CONTEXT, invoke_without_command=True)
@click.version_option(__version__, prog_name="partc")
@click.pass_context
def cli(context: click.Context) -> None:
    """Compile a single-device PyTorch model and a device mesh into readable per-rank Python.

    \b
    MODEL is a Python file with model() and batch(), or hf:PATH/config.json.
    SPEC is 8 (dp), 4x8 (dp x tp), 2x4x8 (pp x dp x tp), or names,
         slowest axis first: pp=2,dp=4,tp=8.

    Exit codes: 0 done, 1 a check did not hold, 2 the input is wrong.
    """
    if context.invoked_subcommand is None:
        console.echo(context.get_help())


cli.add_command(trace_command)
cli.add_command(cluster_command)
cli.add_command(simulate_command)
cli.add_command(plan_command)
cli.add_command(replan_command)


@cli.command("compile", short_help="Compile MODEL for a mesh.")
@click.argument("model")
@compile_options.compile_options(required=False)
@click.option("--plan", type=PATH, metavar="FILE", help="the decisions of partc plan -o FILE, in place of options")
@compile_options.automatic_options()
@click.option("-o", "--output", type=PATH, default=Path("build"), show_default=True, help="folder of the package")
@click.option("--memory-limit", metavar="BYTES", help="fail if a rank holds more (80GB), and list remedies")
@click.option(
    "--dump-after", metavar="PASS|all", multiple=True, help="write the program after a pass, next to the output"
)
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")
@click.pass_context
def compile_command(
    context: click.Context,
    /,
    model: str,
    plan: Path | None,
    output: Path,
    dump_after: tuple[str, ...],
    as_json: bool,
    **given: Any,
) -> None:
    """Compile MODEL for a mesh, or as a plan says, and write its package.

    With --mesh auto and a --cluster, partc plans first: see `partc plan --help`.
    """
    from partc.cli.dump import Dump
    from partc.compilation.plan import AUTO, check_unplanned
    from partc.package.output import check_target

    planned: dict[str, Any] | None = None
    unplanned = {name: given.pop(name) for name in compile_options.AUTOMATIC}
    if plan is not None:
        given |= compile_options.of_plan(plan, context)
    elif given["mesh"] is None:
        raise click.MissingParameter(ctx=context, param_hint="'--mesh'", param_type="option")
    check_target(output)
    if given["mesh"] == AUTO:
        from partc.cli.planning import plan_automatically

        decided, planned = plan_automatically(model, given | unplanned, context, quiet=as_json)
        given |= decided
    else:
        check_unplanned(unplanned)
    options, definitions = compile_options.options(given)
    dump = Dump.of(dump_after, output)
    with console.Phases(quiet=as_json) as phases:
        from partc.api import compilation, package

        done = compilation(model, None, options, model_options=definitions, observe=dump.observe, on_phase=phases.ended)
        compiled = package(done, planned=planned, on_phase=phases.ended)
        compiled.write(output, on_phase=phases.ended)
    report = compiled.report | {"phases": phases.seconds} | ({} if planned is None else {"planned": planned})
    if as_json:
        print(json.dumps(report))
        return
    print_report(report)
    if done.options.kernels == "triton" and importlib.util.find_spec("triton") is None:
        console.echo("warning: the package's kernels need Triton, which is not installed here: pip install triton")
    virtual = ("--virtual",) if compiled.program.mesh.size > 8 else ()
    console.next_step(console.command("partc", "verify", output, *virtual))


@cli.command(
    "verify",
    short_help="Compare a package with its single-device model.",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("directory", metavar="DIR", type=PATH)
@click.option("--steps", type=int, default=3, show_default=True)
@click.option("--virtual", is_flag=True, help="all ranks in one process")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def verify_command(directory: Path, steps: int, virtual: bool, as_json: bool, rest: tuple[str, ...]) -> None:
    """Train a package and its single-device model from one seed; compare loss, gradients and parameters.

    Other options go to train.py and to torch's own optimizer alike: --optimizer, --lr, --weight-decay, --group,
    --no-decay, --clip, --accumulate, --lr-schedule, --warmup, --min-lr, --seed, --data. The defaults are train.py's,
    with --clip 1.
    """
    from partc.package.launch import read_package

    read_package(directory)
    with console.progress_spinner("running the package and the single-device model", quiet=as_json):
        from partc.package.verify import verify

        result = verify(directory, steps=steps, virtual=virtual, arguments=rest)
    worst = result.worst
    if as_json:
        print(
            json.dumps(
                {
                    "ok": result.ok,
                    "losses": [*map(console.finite_or_none, result.losses)],
                    "reference_losses": [*map(console.finite_or_none, result.reference_losses)],
                    "restarted": result.restarted,
                    "worst": {"kind": worst.kind, "name": worst.name, "rel_err": console.finite_or_none(worst.rel_err)},
                }
            )
        )
    else:
        for step, (mine, theirs) in enumerate(zip(result.losses, result.reference_losses, strict=True)):
            console.echo(f"step {step + 1}   loss {mine:.9g}   single device {theirs:.9g}")
        if result.restarted:
            console.echo(
                "The differences after step 1 may be rounding that the optimizer has enlarged. Later steps are "
                "therefore compared from the package's own values."
            )
        place = f"{worst.kind} {worst.name}" if worst.kind != worst.name else worst.kind
        where = f"{place}, step {worst.step}, rank {worst.rank}"
        error = f"relative error {worst.rel_err:.2e} of {result.tolerance:.0e} allowed in {result.rounding}"
        console.echo(f"worst of {result.compared:,}: {where}: {error}")
        console.echo("equal to the single-device model" if result.ok else "NOT equal to the single-device model")
        lost = [step for step, loss in enumerate(result.reference_losses, 1) if not math.isfinite(loss)]
        if lost:
            console.echo(
                f"The single-device model's own loss is not a finite number in step {lost[0]}, so that nothing can be "
                "compared. Change its data, its initial values or --seed."
            )
        elif result.ok:
            infer = ("python", directory / "infer.py", "--virtual", "--batches", 1)
            run = ("partc", "run", directory, "--steps", 20)
            console.next_step(console.command(*(infer if worst.kind == "result" else run)))
        else:
            console.next_step(console.command("partc", "inspect", directory, "--after", "partition", "--diff"))
    if not result.ok:
        raise console.CheckFailed


@cli.command("memory", short_help="Show the peak memory of ranks, and its contents.")
@click.argument("target", metavar="MODEL|DIR")
@compile_options.compile_options(required=False)
@click.option("--rank", type=int, metavar="N", help="the rank to show [default: the rank with the highest peak]")
@click.option("--symbolic", is_flag=True, help="print formulas in batch, sequence, widths and axes for each region")
@click.option("--region", metavar="NAME", help="with --symbolic, only this region")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")
def memory_command(
    target: str,
    rank: int | None,
    symbolic: bool,
    region: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Account for the memory of a training step: parameters, gradients, optimizer, activations, communication.

    For a package, print the account that its compile recorded. For a model, compile it first.
    """
    width = shutil.get_terminal_size((120, 24)).columns
    if symbolic:
        from partc.reports import formula_table

        if rank is not None or given["optimizer"] is not None:
            raise PartcError("P0004", "--symbolic covers regions and all ranks", help="leave out --rank, --optimizer")
        found = compile_options.formulas(target, given)
        if as_json:
            print(json.dumps(formula_table.document(found, region=region)))
        else:
            console.echo(formula_table.page(found, region=region, width=width), nl=False)
        return
    if region is not None:
        raise PartcError("P0004", "--region goes with --symbolic", help="add it, or leave --region out")
    from partc.cost.memory import RESERVE
    from partc.reports.memory_table import page

    account, mesh = compile_options.memory(target, given)
    if as_json:
        print(json.dumps(account.document() | {"reserve": RESERVE}))
        return
    place = None if rank is None else compile_options.place(mesh, rank)
    console.echo(page(account, mesh, place=place, width=width), nl=False)


@cli.command("run", short_help="Train a package on this machine.", context_settings={"ignore_unknown_options": True})
@click.argument("directory", metavar="DIR", type=PATH)
@click.option("--steps", type=int, default=10, show_default=True)
@click.option("--init", type=PATH, metavar="FILE", help="start from a state dict in safetensors")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def run_command(directory: Path, steps: int, init: Path | None, as_json: bool, rest: tuple[str, ...]) -> None:
    """Print the torchrun command that trains a package on this machine, then run it.

    Other options go to train.py: optimizer, learning rate, log, checkpoints (`-- --help` lists them).
    """
    from partc.package.launch import check_trains, read_plan, run

    check_trains(directory)
    if steps < 1:
        raise PartcError("P0504", f"cannot run {steps} steps", help="--steps is 1 or more")
    arguments = (*rest, *(() if init is None else ("--init", str(init))))
    result = run(directory, steps=steps, arguments=arguments, tell=lambda line: console.echo(f"$ {line}", err=as_json))
    if as_json:
        print(
            json.dumps(
                {
                    "losses": [*map(console.finite_or_none, result.losses)],
                    "step_seconds": result.step_seconds,
                    "step_seconds_median": result.step_seconds_median,
                    "tokens_per_second": result.tokens_per_second,
                    "peak_bytes": result.peak_bytes,
                }
            )
        )
        return
    if not result.losses:
        console.echo("no step was left to do")
        return
    from partc.ir.printer import readable

    console.echo(
        f"loss {result.losses[0]:.6g} to {result.losses[-1]:.6g} in {len(result.losses)} steps; "
        f"median step {result.step_seconds_median:.4f} s, {result.tokens_per_second:,.0f} tokens/s, "
        f"at most {readable(max(result.peak_bytes))} a rank"
    )
    if planned := read_plan(directory).get("planned"):
        seconds, size = planned["step_seconds"], readable(planned["memory_bytes"])
        console.echo(f"predicted for {planned['cluster']}: a step of {seconds:.4f} s, {size} a rank")
    console.next_step(console.command("less", directory / "stages" / "stage_0.py"))


@cli.command("export", short_help="Write a checkpoint as a plain state dict.")
@click.argument("directory", metavar="DIR", type=PATH)
@click.argument("checkpoint", metavar="CKPT", type=PATH)
@click.option("--safetensors", "target", type=PATH, required=True, metavar="OUT", help="the file to write")
@click.option(
    "--init",
    type=PATH,
    metavar="FILE",
    help="the state dict that training started from, for tensors that the loss does not use",
)
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")
def export_command(directory: Path, checkpoint: Path, target: Path, init: Path | None, as_json: bool) -> None:
    """Write the model's own state dict from a checkpoint of package DIR, for load_state_dict and transformers.

    CKPT is a checkpoint, or a folder that --save wrote: then its newest complete checkpoint. `train.py --init OUT`
    starts from the file.
    """
    from partc.package.launch import read_package

    read_package(directory)
    with console.progress_spinner("writing", quiet=as_json):
        from partc.package.export import export

        done = export(directory, checkpoint, target, init=init, say=lambda line: console.echo(line, err=True))
    if as_json:
        document = {"step": done.step, "tensors": done.tensors, "bytes": done.bytes, "untrained": list(done.untrained)}
        print(json.dumps(document))
        return
    from partc.ir.printer import readable

    console.echo(f"wrote {target}: {done.tensors:,} tensors, {readable(done.bytes)}, after step {done.step}")
    if done.untrained:
        console.echo(f"as at the beginning, for the loss does not use them: {', '.join(done.untrained)}")


@cli.command("rule", short_help="Draft rules for a model's operations without one.")
@click.argument("model")
@compile_options.compile_options(required=True)
def rule_command(model: str, **given: Any) -> None:
    """Print a draft rule for every operation of MODEL that has none, to be checked and put into the model file."""
    from partc.api import compilation
    from partc.rules.coverage import coverage, missing

    options, definitions = compile_options.options(given)
    program = compilation(model, None, options, model_options=definitions, until="annotate").program
    console.echo(f"# rules cover {coverage(program)}")
    for item in missing(program):
        console.echo(f"\n# {item.source or 'in a loss of torch'}: equal sizes were taken for one factor; correct them.")
        console.echo("# A factor that no result has is summed; blocked ones stay whole. Cuts were tried with numbers.")
        console.echo(str(item))


@cli.command("inspect", short_help="Show the program after any pass.")
@click.argument("target", metavar="MODEL|DIR")
@compile_options.compile_options(required=False)
@click.option("--after", metavar="PASS", help="the program after this pass; `trace` is before the first")
@click.option("--region", metavar="NAME", help="only this region")
@click.option("--diff", is_flag=True, help="the changes of the pass")
@click.option("--sources", is_flag=True, help="with the model's line of each operation")
@click.option("--provenance", is_flag=True, help="the pass that first made each value")
@click.option("--explain", "name", metavar="NAME", help="the reasons for the layout of a value or weight")
@click.option("--schedules", is_flag=True, help="the predicted timelines of all schedules, side by side")
@click.option(
    "--durations", metavar="F=1,B=2,...", help="durations of F, B, I, W of a microbatch and of comm, for --schedules"
)
@click.option("--html", type=PATH, metavar="FILE", help="one page with everything, for a browser")
@click.option("--rank", type=int, metavar="N", help="the groups, links, shards and schedule of one rank of package DIR")
def inspect_command(target: str, **given: Any) -> None:
    """Show the program of a model or of a package, after any pass."""
    from partc.cli import inspection

    inspection.check_one_view(given)
    rank = given.pop("rank")
    if rank is not None:
        from partc.package.rank_view import rank_view

        console.echo(rank_view(Path(target), rank))
        return
    wanted = {key: given.pop(key) for key in ("after", "region", "diff", "sources", "provenance", "name", "html")}
    side_by_side, durations = given.pop("schedules"), given.pop("durations")
    if durations is not None and not side_by_side:
        raise PartcError("P0412", "--durations needs --schedules", help="add --schedules")
    model, options, definitions = compile_options.target(target, given)
    if side_by_side:
        console.echo(_schedules(options, durations), nl=False)
        return
    until = inspection.last_pass(after=wanted["after"], name=wanted["name"], html=wanted["html"])
    with console.progress_spinner("compiling", quiet=wanted["html"] is None):
        from partc.api import compilation

        done = compilation(model, None, options, model_options=definitions, until=until)
    if wanted["html"] is not None:
        _write_page(done, wanted["html"])
    elif wanted["name"] is not None:
        console.echo(inspection.layout_explanation(done, wanted["name"]))
    elif wanted["provenance"]:
        console.echo(inspection.value_origins(done, region=wanted["region"]))
    else:
        text = inspection.text(
            done, after=until, region=wanted["region"], diff=wanted["diff"], sources=wanted["sources"]
        )
        console.echo(text.rstrip("\n"))


def _schedules(options: Options, given: str | None) -> str:
    from partc.cost.simulation import Durations
    from partc.ir.mesh import PIPELINE_AXIS
    from partc.reports.schedule_comparison import candidates, text

    ranks = options.mesh.axis(PIPELINE_AXIS)
    durations = Durations() if given is None else Durations.parse(given)
    found = candidates(
        ranks,
        options.microbatches,
        virtual_stages=options.virtual_stages,
        table=options.table,
        durations=durations,
    )
    heading = f"{ranks} pipeline ranks, {options.microbatches} microbatches, of which each takes a rank {durations}"
    return f"{heading}\n\n{text(found, width=shutil.get_terminal_size((120, 24)).columns)}"


def _write_page(done: Compilation, path: Path) -> None:
    from partc.package.output import write_page
    from partc.reports.html_report import page

    options = done.options
    write_page(page(done.program, optimizer=options.optimizer, groups=options.group), path)
    console.echo(f"wrote {path}")
    console.next_step(f"open {path} in a browser")


@cli.command("examples", short_help="Copy the example model files.")
@click.argument("directory", metavar="DIR", type=PATH, default=Path("examples"))
def examples_command(directory: Path) -> None:
    """Copy the example model files into DIR (examples/ by default)."""
    from partc.frontend.model_files.example_files import copy_examples

    for path in copy_examples(directory):
        console.echo(f"wrote {path}")
    given = ("--mesh", "2x2x2", "--microbatches", 4)
    console.next_step(console.command("partc", "compile", directory / "gpt.py", *given))


@cli.command("doctor", short_help="Report the capabilities of this machine.")
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")
def doctor_command(as_json: bool) -> None:
    """Report the capabilities of this machine: torch, triton, GPUs, gloo and NCCL."""
    from partc.cli.doctor import findings

    found = list(findings())
    if as_json:
        print(json.dumps({item.what: {"found": item.found, "meaning": item.meaning, "ok": item.ok} for item in found}))
    else:
        marks = {True: "ok", False: "no", None: "  "}
        left, middle = max(len(item.what) for item in found), max(len(item.found) for item in found)
        for item in found:
            console.echo(f"{marks[item.ok]}  {item.what:<{left}}  {item.found:<{middle}}  {item.meaning}")
    if any(item.ok is False for item in found):
        raise console.CheckFailed


@cli.command("explain", short_help="Explain an error code.")
@click.argument("code", required=False)
def explain_command(code: str | None) -> None:
    """Explain an error code, or list all codes."""
    from partc.explain import explanation, listing

    console.echo(listing() if code is None else explanation(code))
