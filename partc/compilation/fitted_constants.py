"""Constants of the cost model from measured runs: those with which predictions come closest to the measured steps.

A file of runs is either the `--metrics` of a package, whose folder has the same name and lies next to it, or has a plan
on each line, with its `model` and measured `step_seconds`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from partc.cluster.cluster import Cluster, fitted
from partc.compilation.plan import ParallelPlan, json_lines
from partc.compilation.simulation import Simulator
from partc.cost.calibration import Calibration
from partc.cost.forecast import Forecast
from partc.cost.rates import ClusterRates
from partc.errors import PartcError
from partc.ir.program import Program
from partc.runtime.documents import Malformed, decoded, parsed

MARK = "fitted by `partc cluster fit`"
_WARM = 3  # steps at a run's start that are ignored if there are more
_HOLD = 0.003  # the weight of a constant's deviation from its start, relative to a run's error
_FACTORS = (1.3, 1.1, 1.03, 1.01)
_SHORTEST, _LONGEST = 1e-9, 1e9  # seconds of a step
_MOST = 1.5  # the upper bound of constants that are shares


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A program and the seconds of its measured steps."""

    name: str
    program: Program
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The constants, and the prediction's error for each run before and after, as a share of the measured time."""

    constants: Calibration
    before: tuple[float, ...]
    after: tuple[float, ...]


def fit(runs: Sequence[MeasuredRun], cluster: Cluster, start: Calibration) -> Fit:
    """The constants with the least sum of squared logarithmic errors.

    They stay at their start unless runs demand otherwise: a constant on which no run depends keeps its value.
    """

    def errors(constants: Calibration) -> tuple[float, ...]:
        rates = ClusterRates(cluster, constants)
        return tuple(Forecast(run.program, rates).seconds / run.seconds - 1 for run in runs)

    def loss(constants: Calibration) -> float:
        apart = (_log_ratio(getattr(constants, name), getattr(start, name)) for name in constants.__slots__)
        return sum(math.log1p(error) ** 2 for error in errors(constants)) + _HOLD * sum(each**2 for each in apart)

    best, least = start, loss(start)
    for factor in _FACTORS:
        improves = True
        while improves:
            improves = False
            for name in start.__slots__:
                for by in (factor, 1 / factor):
                    tried = replace(best, **{name: min(_MOST, getattr(best, name) * by)})
                    found = loss(tried)
                    if found < least * (1 - 1e-4):
                        best, least, improves = tried, found, True
    rounded = replace(best, **{item.name: float(f"{getattr(best, item.name):.4g}") for item in fields(best)})
    return Fit(constants=rounded, before=errors(start), after=errors(rounded))


def _log_ratio(value: float, start: float) -> float:
    return math.log(value / start) if value and start else 0.0


def toml(constants: Calibration) -> str:
    """The text of a file with the constants, which `--calibration` reads."""
    lines = (f"{name} = {getattr(constants, name):g}\n" for name in constants.__slots__)
    return f"# Constants of the cost model, {MARK}.\n{''.join(lines)}"


def read_runs(
    files: Sequence[Path], cluster: Cluster, constants: Calibration, program_of: Callable[[Path], Program]
) -> Iterator[MeasuredRun]:
    """The runs of the files; `program_of` compiles a package's model again.

    Raises PartcError P0809, and the error of a program that cannot be compiled; its cause starts with the run's place.
    """
    simulators: dict[str, Simulator] = {}
    for file in files:
        lines = tuple(_lines(file))
        if all("mesh" in line for _, line in lines):
            for name, line in lines:
                model, seconds = line.pop("model", None), line.pop("step_seconds", None)
                if not isinstance(model, str) or not _is_time(seconds):
                    raise _unreadable(f"{name} has no model, or no step_seconds of {_SHORTEST:g} to {_LONGEST:g}")
                plan = ParallelPlan.of(line, place=name)
                with _naming(name):
                    fitted(cluster, plan.compile_options().mesh.size)
                    simulator = simulators.setdefault(model, Simulator(model, cluster, constants))
                    program = simulator.program(plan)
                yield MeasuredRun(name=f"{name} {plan.mesh}", program=program, seconds=seconds)
            continue
        steps = [line["seconds"] for _, line in lines if _is_time(line.get("seconds"))]
        package = file.with_suffix("")
        if not steps or not (package / "plan.json").is_file():
            raise _unreadable(f"{file} has no steps" if not steps else f"{file} has no package {package} next to it")
        with _naming(str(file)):
            program = program_of(package)
            fitted(cluster, program.mesh.size)
        seconds = statistics.median(steps[_WARM:] or steps)
        yield MeasuredRun(name=file.stem, program=program, seconds=seconds)


@contextmanager
def _naming(run: str) -> Iterator[None]:
    try:
        yield
    except PartcError as error:
        raise PartcError(error.code, f"{run}: {error.cause}", help=error.help, source=error.source) from error


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file, with their places. Raises PartcError P0809."""
    place = str(file)
    try:
        for number, line in json_lines(file):
            place = f"{file}:{number}"
            yield place, decoded(dict[str, Any], parsed(line))
    except Malformed as error:
        raise _unreadable(f"{place} {error}") from None
    if place == str(file):
        raise _unreadable(f"{file} has no objects of JSON, one a line")


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _SHORTEST <= value <= _LONGEST


def _unreadable(cause: str) -> PartcError:
    help = "give the --metrics of packages that lie next to them, or plans with model and step_seconds"
    return PartcError("P0809", cause, help=help)
