"""Verification of a forward-only package: compares its results with the results of the single-device model."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from partc.errors import PartcError
from partc.package.comparison import (
    MIXED,
    TOLERANCES,
    Difference,
    VerifyResult,
    difference,
    largest_magnitude,
    root_mean_square,
)
from partc.package.launch import LoggedRun, read_plan, run_concurrently, searching, torchrun_command
from partc.runtime.checkpoint.safetensors import load
from partc.runtime.errors import UsageError
from partc.runtime.train.inference import check


def verify_results(directory: Path, *, batches: int, virtual: bool, arguments: Sequence[str]) -> VerifyResult:
    """Run the package and the model on the same batches with parameters of the same seed, and compare every result.

    `arguments` are options of infer.py. Raises RunFailed if a run stops, and PartcError for invalid options.
    """
    plan = read_plan(directory)
    given = ["--batches", str(batches), *arguments]
    try:
        job = check(given, directory)
    except UsageError as error:
        raise PartcError(error.code, error.cause, help=error.help) from error
    if job.steps != batches:
        raise PartcError(
            "P0504",
            f"the options for infer.py run {job.steps} batches, and the comparison {batches}",
            help="give the number of batches as --steps before the --",
        )
    rounding = str(plan.get("rounds", plan["precision"]))
    with tempfile.TemporaryDirectory(prefix="partc-verify-") as name:
        folder = Path(name)
        mine, plain = folder / "package", folder / "plain"
        own = [*given, "--out", str(mine)]
        script = [sys.executable, str(directory / "infer.py"), "--virtual", *own]
        command = [sys.executable, "-m", "partc.package.reference_results", str(directory), str(plain), *given]
        run_concurrently(
            [
                LoggedRun(
                    label="the package", output=folder / "package.txt",
                    command=script if virtual else torchrun_command(directory, own),
                ),
                LoggedRun(
                    label="the single-device model", output=folder / "plain.txt", refusals=plain, command=command,
                    environment=searching(),
                ),
            ]
        )  # fmt: skip
        differences = [
            difference for number in range(batches) for difference in _compared(mine, plain, number, rounding in MIXED)
        ]
    tolerance = TOLERANCES[rounding]["gradient"]
    worst = max(differences, key=lambda difference: difference.rel_err)
    return VerifyResult(
        ok=worst.rel_err <= tolerance,
        losses=(),
        reference_losses=(),
        worst=worst,
        tolerance=tolerance,
        rounding=rounding,
        compared=len(differences),
    )


def _compared(mine: Path, plain: Path, number: int, mixed: bool) -> Iterator[Difference]:
    found, expected = (load(folder / f"batch_{number:06d}.safetensors")[0] for folder in (mine, plain))
    for name in sorted({*found, *expected}):
        alike = name in found and name in expected and found[name].shape == expected[name].shape
        error = _relative_difference(found[name], expected[name], mixed) if alike else float("inf")
        yield Difference(kind="result", name=name, rel_err=error, step=number + 1)


def _relative_difference(mine: Tensor, theirs: Tensor, mixed: bool) -> float:
    """The difference relative to the result's scale. For integers, such as positions of maxima: the share that
    differs.
    """
    if not theirs.is_floating_point():
        return float((mine != theirs).double().mean()) if mine.numel() else 0.0
    measure = root_mean_square if mixed else largest_magnitude
    error, scale = difference(mine.double(), theirs.double(), measure), measure(theirs)
    return error / scale if scale else (0.0 if error == 0 else float("inf"))
