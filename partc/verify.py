"""Proof by training: a package against the single-device model it was compiled from."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partc.errors import PartcError
from partc.launch import RunFailed, gpus, local_environment, read_package, read_plan, read_reports, torchrun_command
from partc.mesh import PIPELINE_AXIS, Mesh
from partc.runtime.layout import Shard
from partc.runtime.tensors import load

# What rounding alone may do. fp64 leaves no room for anything else; fp32 sums in another order.
TOLERANCES: Mapping[str, Mapping[str, float]] = {
    "fp64": {"loss": 1e-10, "gradient": 1e-10, "parameter": 1e-10},
    # Against torch's autocast, which rounds in other places: activations have 8 (bf16) or 11 (fp16) bits.
    "bf16": {"loss": 2e-2, "gradient": 1e-1, "parameter": 1e-2},
    "fp16": {"loss": 5e-3, "gradient": 5e-2, "parameter": 1e-2},
    "fp32": {"loss": 1e-5, "gradient": 2e-4, "parameter": 2e-4},
    # Gradients that cross nodes with 255 steps for 256 numbers; what a step leaves out, the next makes up for.
    "int8": {"loss": 2e-2, "gradient": 3e-1, "parameter": 1e-2},
}
MIXED = ("bf16", "fp16", "int8")
# Tensors much smaller than the largest of their kind are measured against this part of it: some
# gradients are zero but for rounding (a key's bias), and have no scale of their own.
SMALLEST_SCALE: Mapping[str, float] = {"fp64": 1e-3, "fp32": 1e-2, "bf16": 1e-1, "fp16": 1e-1, "int8": 1e-1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One comparison: a loss, a gradient or a parameter, on one rank after one step."""

    kind: str
    name: str
    rel_err: float
    step: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """What `partc verify --json` prints."""

    ok: bool
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    worst: Difference
    tolerance: float  # of the worst difference's kind
    compared: int  # how many tensors and losses


def verify(
    directory: Path,
    *,
    steps: int = 3,
    virtual: bool = False,
    optimizer: str = "sgd",
    lr: float = 0.01,
    clip: float | None = None,
    accumulate: int = 1,
    reference: Path | None = None,
) -> VerifyResult:
    """Train twice from the same seed, and compare every loss, gradient and parameter on every rank.

    With `virtual`, all ranks run in one process. `reference` is where the single-device model's run
    is kept: one that stands there is used again, so that packages of one model on many meshes share
    it. Raises RunFailed when either training stops.
    """
    plan = read_package(directory)
    if steps < 1:
        raise PartcError("P0504", f"cannot verify {steps} steps", help="--steps is 1 or more")
    with tempfile.TemporaryDirectory(prefix="partc-verify-") as name:
        folder = Path(name)
        plain = reference or folder / "reference"
        if plan["repeated"]:  # another run than that of the whole batch
            plain = plain / f"{plan['microbatches']}_batches"
        settings = {"optimizer": optimizer, "lr": lr, "clip": clip, "accumulate": accumulate}
        _train_both(directory.resolve(), folder, plain, steps, virtual, settings)
        reference_steps = [load(plain / f"step_{step:04d}.safetensors") for step in range(steps)]
        losses = next(report["losses"] for report in read_reports(folder / "report") if report["logs"])
        reference_losses = [float(metadata["loss"]) for _, metadata in reference_steps]
        differences = [
            Difference(kind="loss", name="loss", rel_err=relative_error(mine, theirs, abs(theirs)), step=step)
            for step, (mine, theirs) in enumerate(zip(losses, reference_losses, strict=True))
        ]
        for step, (tensors, _) in enumerate(reference_steps):
            differences += _compare_step(plan, folder / "record", step, tensors)
    tolerances = TOLERANCES[_rounding(plan)]
    worst = max(differences, key=lambda difference: difference.rel_err / tolerances[difference.kind])
    return VerifyResult(
        ok=all(difference.rel_err <= tolerances[difference.kind] for difference in differences),
        losses=tuple(losses),
        reference_losses=tuple(reference_losses),
        worst=worst,
        tolerance=tolerances[worst.kind],
        compared=len(differences),
    )


def relative_error(mine: Tensor | float, theirs: Tensor | float, scale: float) -> float:
    """The largest difference over `scale`; infinite where either isn't a number."""
    error = (
        float((torch.as_tensor(mine) - torch.as_tensor(theirs)).abs().amax()) if torch.as_tensor(mine).numel() else 0.0
    )
    if not math.isfinite(error):
        return math.inf
    return error / scale if scale > 0 else (0.0 if error == 0 else math.inf)


def _train_both(
    directory: Path, folder: Path, reference: Path, steps: int, virtual: bool, settings: Mapping[str, Any]
) -> None:
    """Run the single-device model, unless its run is there already, and the package side by side."""
    given = {"steps": steps, **{name: value for name, value in settings.items() if value is not None}}
    arguments = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    arguments = [*arguments, "--record", str(folder / "record"), "--report", str(folder / "report")]
    if (directory / "runtime" / "tuning.py").is_file():
        arguments.append("--no-tuning")  # a few steps aren't worth the time
    ranks = Mesh.parse(read_plan(directory)["mesh"]).size
    if (directory / "runtime" / "graphs.py").is_file() and (virtual or gpus() < ranks):
        arguments.append("--no-cuda-graphs")  # of GPUs
    package = (
        [sys.executable, str(directory / "train.py"), "--virtual", *arguments]
        if virtual
        else torchrun_command(directory, arguments)
    )
    plain = [
        sys.executable,
        "-m",
        "partc.reference",
        str(directory),
        str(reference),
        str(steps),
        json.dumps(settings),
    ]
    root = str(Path(__file__).resolve().parent.parent)
    search = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    runs = {"the package": _start(package, folder / "package.txt", {})}
    if not (reference / f"step_{steps - 1:04d}.safetensors").exists():
        reference.mkdir(parents=True, exist_ok=True)
        runs["the single-device model"] = _start(plain, folder / "plain.txt", {"PYTHONPATH": search})
    outputs = {"the single-device model": folder / "plain.txt", "the package": folder / "package.txt"}
    try:
        codes = {what: process.wait() for what, process in runs.items()}
    finally:
        for process in runs.values():
            process.terminate()
    for what, code in codes.items():
        if code:
            raise RunFailed(what, code, outputs[what].read_text(errors="replace"))


def _start(command: list[str], output: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(command, env={**local_environment(), **variables}, stdout=file, stderr=file)


def _rounding(plan: Mapping[str, Any]) -> str:
    """Whose rounding a package shows: gradients may travel in less than they are made in."""
    command = plan.get("command", {})
    fewer = [command[name] for name in ("compress_grads", "grad_reduce") if name in command]
    return str(fewer[0] if fewer else plan["precision"])


def _compare_step(
    plan: Mapping[str, Any], record: Path, step: int, reference: Mapping[str, Tensor]
) -> Iterator[Difference]:
    """Every rank's gradients and parameters of a step against their slices of the reference."""
    mesh = Mesh.parse(plan["mesh"])
    smallest = SMALLEST_SCALE[_rounding(plan)]
    measure = _root_mean_square if _rounding(plan) in MIXED else _largest
    floors = {
        kind: smallest * max((measure(x) for name, x in reference.items() if name.startswith(kind)), default=0.0)
        for kind in ("gradient", "parameter")
    }
    for rank in range(mesh.size):
        mine, _ = load(record / f"step_{step:04d}_rank_{rank:03d}.safetensors")
        coordinate = mesh.coordinate(rank)
        for name, entry in plan["parameters"].items():
            if coordinate.get(PIPELINE_AXIS, 0) not in [plan["places"][stage] for stage in entry["stages"]]:
                continue
            shard = Shard(entry["dtype"] + entry["layout"], holds=tuple(entry["shape"]))
            kinds = ("gradient", "parameter") if entry["trainable"] else ("parameter",)
            for kind in kinds:
                whole = _whole(reference, kind, name, shard)
                theirs = shard.local(whole, mesh.sizes, coordinate)
                key = f"{kind}/{name}"
                if key not in mine or mine[key].shape != theirs.shape:
                    error = math.inf
                else:
                    error = relative_error(_apart(mine[key], theirs, measure), 0.0, max(measure(whole), floors[kind]))
                yield Difference(kind=kind, name=name, rel_err=error, step=step, rank=rank)


def _whole(reference: Mapping[str, Tensor], kind: str, name: str, shard: Shard) -> Tensor:
    """The reference's tensor; a parameter that the loss doesn't depend on has a gradient of zeros."""
    if f"parameter/{name}" not in reference:
        raise PartcError(
            "P0502",
            f"model.py makes no parameter {name!r}, which the plan has",
            help="compile again: model.py or its options have changed since",
        )
    if f"{kind}/{name}" not in reference:
        return torch.zeros(shard.shape, dtype=shard.dtype)
    return reference[f"{kind}/{name}"]


def _apart(mine: Tensor, theirs: Tensor, measure: Callable[[Tensor], float]) -> float:
    """The measure of a difference; infinite where numbers that are not rounded differ."""
    if not theirs.is_floating_point():
        return 0.0 if torch.equal(mine, theirs) else math.inf
    return measure(mine - theirs)


def _largest(x: Tensor) -> float:
    return float(x.abs().amax()) if x.numel() and x.is_floating_point() else 0.0


def _root_mean_square(x: Tensor) -> float:
    """What rounding in few bits leaves of a tensor as a whole: single elements may fall on the other side of a relu."""
    return float(x.double().square().mean().sqrt()) if x.numel() and x.is_floating_point() else 0.0
