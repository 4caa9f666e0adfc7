"""Running a package on this machine: the torchrun command, and the reports of the ranks."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from partc.errors import PartcError, Source, first_line
from partc.frontend.model_files.model_file import is_file
from partc.ir.mesh import PIPELINE_AXIS, Mesh
from partc.runtime import plan as plans
from partc.runtime.documents import Malformed
from partc.runtime.processes.processes import children, place_of, run_state
from partc.runtime.refusal import Refusal, read_refusal
from partc.runtime.whole_files import write_whole

Tell = Callable[[str], None]
LAUNCHER_CHECK_SECONDS = 15.0  # between checks of a launcher


class RunFailed(Exception):
    """A package (or its model) stopped with an error: exit code 1, with its output in `output`."""

    def __init__(self, what: str, code: int, output: str) -> None:
        super().__init__("\n".join([f"{what} stopped with exit code {code}", *_without_launcher(output)[-30:]]))
        self.code = code
        self.output = output


def _without_launcher(output: str) -> list[str]:
    """The lines before torchrun's own traceback, which follows the ranks' errors and does not explain them."""
    lines = output.splitlines()
    for number, (line, following) in enumerate(itertools.pairwise(lines)):
        if line.startswith("Traceback") and re.search(r"torchrun|torch/distributed/run\.py", following):
            return lines[:number]
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The document that `partc run --json` prints."""

    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    step_seconds_median: float
    tokens_per_second: float
    peak_bytes: tuple[int, ...]  # by rank


def read_plan(directory: Path) -> dict[str, Any]:
    """The contents of a package's plan.json. Raises PartcError P0503 if the folder is not a package."""
    path = directory / "plan.json"
    if not is_file(path):
        raise PartcError(
            "P0503",
            f"{directory} is not a partc package: it has no plan.json",
            help="name a folder that `partc compile` wrote",
        )
    try:
        plan = plans.read(directory)
    except Malformed as error:
        raise PartcError("P0503", f"{path} {error}", help="compile again: the file has been changed") from None
    Mesh.parse(plan["mesh"])
    return plan


def literals(path: Path) -> SimpleNamespace:
    """The constants of a module, read without executing it. Raises PartcError P0503."""
    found = {}
    try:
        for each in ast.parse(path.read_bytes()).body:
            match each:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ):
                    found[name] = ast.literal_eval(value)
    except (MemoryError, OSError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise PartcError(
            "P0503", f"{path} {first_line(error)}", help="compile again: the file has been changed"
        ) from None
    return SimpleNamespace(**found)


def read_package(directory: Path) -> dict[str, Any]:
    """The contents of plan.json. Raises PartcError P0503 if a file of the package is missing, or is for another
    mesh.
    """
    plan = read_plan(directory)
    ranks = [f"ranks/pp_{place}.py" for place in range(Mesh.parse(plan["mesh"]).axis(PIPELINE_AXIS))]
    stages = [f"stages/stage_{stage}.py" for stage in range(plan["stages"])]
    script = "infer.py" if plan.get("results") else "train.py"
    for name in (script, "model.py", "runtime/train/train.py", *stages, *ranks):
        if not (directory / name).is_file():
            raise PartcError("P0503", f"{directory} lacks {name}", help="compile again, or copy the whole package")
    for name in ranks:
        mesh = getattr(literals(directory / name), "MESH", "another mesh")
        if mesh != plan["mesh"]:
            raise PartcError("P0503", f"{directory / name} is for {mesh}, not for {plan['mesh']}", help="compile again")
    return plan


def check_trains(directory: Path) -> None:
    """Raise PartcError P0504 for a package that only runs forward."""
    if read_plan(directory).get("results"):
        help = f"torchrun ... {directory}/infer.py, or python {directory}/infer.py --virtual"
        raise PartcError("P0504", f"{directory} trains nothing: it was compiled with --forward-only", help=help)


def torchrun_command(directory: Path, arguments: Sequence[str]) -> list[str]:
    """The command that runs a package on this machine, one process per rank; on CPUs if there are too few GPUs."""
    beside = Path(sys.executable).with_name("torchrun")
    launcher = [str(beside)] if beside.exists() else [sys.executable, "-m", "torch.distributed.run"]
    plan = read_plan(directory)
    ranks, script = Mesh.parse(plan["mesh"]).size, "infer.py" if plan.get("results") else "train.py"
    device = ["--device", "cpu"] if 0 < gpus() < ranks and "--device" not in arguments else []
    return [*launcher, "--standalone", "--nproc-per-node", str(ranks), str(directory / script), *device, *arguments]


def gpus() -> int:
    """The number of GPUs that this process can see."""
    import torch

    return torch.cuda.device_count()


def run(
    directory: Path, *, steps: int = 10, arguments: Sequence[str] = (), tell: Tell = lambda line: None
) -> RunResult:
    """Train a package for some steps with real processes; `tell` receives the torchrun command first.

    `arguments` are options of train.py; their `--steps` replaces `steps`. The ranks' output goes to stderr as it comes.
    Raises PartcError if train.py or its ranks reject their input, and RunFailed if they stop otherwise.
    """
    from partc.runtime.device.cuda_graphs import need_gpus
    from partc.runtime.errors import UsageError
    from partc.runtime.train.command_line import parse
    from partc.runtime.train.job import check_places

    plan = read_package(directory)
    counted = any(word.partition("=")[0] == "--steps" for word in arguments)
    given = [*arguments] if counted else ["--steps", str(steps), *arguments]
    try:
        job = parse(given, directory)
        check_places(job)
        if job.cuda_graphs:
            need_gpus(not job.virtual and gpus() >= job.world_size and job.device != "cpu")
    except UsageError as error:
        raise PartcError(error.code, error.cause, help=error.help) from error
    lines = plans.launches(job.world_size, plan["command"].get("nodes"))
    if len(lines) > 1 and not job.virtual:
        for line in [*lines[:2], *(["..."] if len(lines) > 3 else []), *lines[2:][-1:]]:
            tell(f"{line} {shlex.join(given)}" if line != "..." else line)
        if job.world_size > plans.ONE_MACHINE:
            raise PartcError(
                "P0549",
                f"{job.world_size:,} ranks do not run on this machine: each of {len(lines):,} nodes runs its line",
                help="start the lines above on the nodes, or add --virtual to run all ranks in one process",
            )
    command = (
        [sys.executable, str(directory / "train.py"), *given] if job.virtual else torchrun_command(directory, given)
    )
    tell(shlex.join(command))
    with tempfile.TemporaryDirectory(prefix="partc-run-") as name:
        folder = Path(name)
        code, stopped = run_watched([*command, "--report", name], launches=not job.virtual)
        reports = read_reports(folder)
        if job.report is not None:
            copy_reports(folder, job.report)
        # A stopped torchrun reports failure, even if its ranks have saved and exited successfully.
        if code and not (stopped and len(reports) == job.world_size):
            raise refusal(folder) or RunFailed("the package", code, "")
    from partc.runtime.layout import tokens_per_step  # imported here, because it loads torch

    logging = next(report for report in reports if report["logs"])
    seconds = tuple(logging["step_seconds"])
    median = statistics.median(seconds) if seconds else 0.0
    return RunResult(
        losses=tuple(logging["losses"]),
        step_seconds=seconds,
        step_seconds_median=median,
        tokens_per_second=tokens_per_step(plan) * logging["batches_per_step"] / median if median else 0.0,
        peak_bytes=tuple(report["peak_bytes"] for report in reports),
    )


def copy_reports(folder: Path, target: Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            write_whole(target / path.name, path.read_text())
    except OSError as error:
        cause = f"{target}, which --report names, cannot be written: {error.strerror}"
        raise PartcError("P0538", cause, help="name a place with room") from error


def run_watched(command: Sequence[str], *, launches: bool) -> tuple[int, bool]:
    """Run a command to its end and forward signals. Returns its exit code, and whether it was asked to stop.

    Raises PartcError P0536 if the command `launches` ranks, and is stopped before it has started any.
    """
    asked: list[int] = []
    process = subprocess.Popen(command, env=local_environment(), stdout=sys.stderr)

    def pass_on(number: int, frame: object) -> None:
        asked.append(number)
        process.send_signal(number)

    main = threading.current_thread() is threading.main_thread()
    old = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGHUP) if main}
    try:
        code = _ended(process) if launches else process.wait()
    except KeyboardInterrupt:  # the terminal has signalled the command, too
        process.wait(timeout=60)
        raise
    finally:
        process.kill()
        process.wait()
        for number, handler in old.items():
            signal.signal(number, handler)
    return code, bool(asked)


def _ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a launcher, once it has ended. A suspended launcher has two checks' time to continue."""
    stopped = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=LAUNCHER_CHECK_SECONDS)
        stopped = stopped + 1 if run_state(place_of(process.pid) or "") == "stopped" else 0
        if stopped == 2 and not children(process.pid):
            cause = f"the launcher (process {process.pid}) was stopped before it started a rank"
            raise PartcError("P0536", cause, help="start the run again, and leave torchrun running")


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """The final reports of the ranks, in the order of ranks."""
    reports = [json.loads(path.read_text()) for path in folder.glob("rank_*.json")]
    return sorted(reports, key=lambda report: int(report["rank"]))


def refusal(folder: Path) -> PartcError | None:
    """The error with which a run rejected its input, read from the folder of its reports; None if it did not."""
    found = read_refusal(folder)
    if found is None:
        return None
    source = None if found.source is None else Source(**found.source)
    return PartcError(found.code, found.cause, help=found.help, source=source)


@contextmanager
def refusals_reported(folder: Path) -> Iterator[None]:
    """A context that writes an error for wrong input to a folder, where another process reads it by `refusal`, and
    ends this process with exit code 2.
    """
    try:
        yield
    except PartcError as error:
        source = None if error.source is None else asdict(error.source)
        Refusal(code=error.code, cause=error.cause, help=error.help, source=source).write(folder)
        sys.exit(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """A command for a process of its own, which writes all its output to a file."""

    label: str
    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    output: Path
    refusals: Path | None = None  # the folder to which the process writes an error for wrong input

    def check(self, code: int) -> None:
        """Raises the process's own error for wrong input, or RunFailed, unless the exit code is 0."""
        if code:
            refused = None if self.refusals is None else refusal(self.refusals)
            raise refused or RunFailed(self.label, code, self.output.read_text(errors="replace"))


def run_concurrently(runs: Sequence[LoggedRun]) -> None:
    """Run commands at the same time, each to its end. Raises the error of the first of them that failed."""
    processes = [started(run.command, run.output, run.environment) for run in runs]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.terminate()
    for run, code in zip(runs, codes, strict=True):
        run.check(code)


def local_environment() -> dict[str, str]:
    """The environment of this process, with one thread per rank unless the user has set a number."""
    return {"OMP_NUM_THREADS": "1", **os.environ}


def searching() -> dict[str, str]:
    """The environment in which a process can import partc; packages do not need it."""
    root = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}


def started(command: list[str], output: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process on this machine that writes all its output to a file."""
    with output.open("wb") as file:
        return subprocess.Popen(command, env={**local_environment(), **variables}, stdout=file, stderr=file)
