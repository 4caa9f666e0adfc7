"""Verification by training: compares a package with the single-device model from which it was compiled."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partc.errors import PartcError
from partc.ir.layout import Layout, index_ranges
from partc.ir.mesh import PIPELINE_AXIS, Mesh
from partc.package.comparison import (
    MIXED,
    TOLERANCES,
    Difference,
    VerifyResult,
    difference,
    largest_magnitude,
    relative_error,
    root_mean_square,
)
from partc.package.launch import (
    LoggedRun,
    gpus,
    read_package,
    read_plan,
    read_reports,
    run_concurrently,
    searching,
    torchrun_command,
)
from partc.package.reference import DATA, ReferenceUpdate, balanced_biases
from partc.package.verify_results import verify_results
from partc.runtime.checkpoint.safetensors import load, save
from partc.runtime.errors import UsageError
from partc.runtime.layout import Shard
from partc.runtime.plan import order_of
from partc.runtime.processes.devices import Wanted
from partc.runtime.train.command_line import parse
from partc.runtime.train.job import Job

# How a run updates its parameters: options of train.py that the single-device model follows too.
RECIPE = (
    "optimizer", "lr", "weight_decay", "no_decay", "group", "clip", "accumulate", "lr_schedule", "warmup", "min_lr",
    "data", "data_dtype", "data_labels", "data_end",
)  # fmt: skip
CLIP = 1.0  # used if the options have no --clip, so that clipping is compared as well
# All gradients of a model may be zero but for rounding. If a parameter moved by the magnitude of the largest parameter,
# a smaller difference of gradients would change the loss by less than this fraction of it: such gradients are equal.
LOSS_NOISE: Mapping[str, float] = {"fp64": 2.0**-48, "fp32": 2.0**-23}
# Tensors much smaller than the largest of their kind are measured against this part of it: some
# gradients are zero but for rounding (a key's bias), and have no scale of their own.
SMALLEST_SCALE: Mapping[str, float] = {"fp64": 1e-3, "fp32": 1e-2, "bf16": 1e-1, "fp16": 1e-1, "int8": 1e-1}


def verify(
    directory: Path,
    *,
    steps: int = 3,
    virtual: bool = False,
    arguments: Sequence[str] = (),
    reference: Path | None = None,
) -> VerifyResult:
    """Train the package and the model from the same seed, and compare every loss, gradient and parameter on every rank.

    `arguments` are training options of train.py; its defaults apply, and gradients are clipped (`CLIP`). With
    `virtual`, all ranks run in one process. `reference` is a folder for the single-device run. An existing run in it is
    reused, so that packages of one model on many meshes share it. Raises PartcError P0504 for invalid options and
    train.py's errors for wrong input, and RunFailed if a training stops otherwise.

    If all differences are of later steps, rounding may have grown: optimizers that divide a gradient by its own size,
    or take its sign, turn the rounding errors of a gradient that is zero into updates. Then the model is trained
    again, and each of its steps starts from the package's own values after the step before.
    """
    plan = read_package(directory)
    if steps < 1:
        raise PartcError("P0504", f"cannot verify {steps} steps", help="--steps is 1 or more")
    if plan["command"].get("expert_capacity"):
        raise PartcError(
            "P0109",
            f"partc verify compares with the model, whose experts take all rows; those of this package take "
            f"{plan['command']['expert_capacity']}",
            help="verify the package without --expert-capacity",
        )
    if plan.get("draws_for_rows"):
        raise PartcError(
            "P0207",
            "random numbers, such as those of a dropout, are drawn for the rows that a mask selects: the package draws "
            "them by place, a single device by order, so that the two cannot be compared",
            help="compile and verify the model without them, such as with a dropout of 0",
        )
    if plan.get("results"):
        return verify_results(directory.resolve(), batches=steps, virtual=virtual, arguments=arguments)
    job, recipe = _recipe(directory, ["--steps", str(steps), *arguments])
    if job.steps != steps:
        raise PartcError(
            "P0504",
            f"the options for train.py take {job.steps} steps, and the comparison {steps}",
            help="give the number of steps before the --, or to `steps`",
        )
    with tempfile.TemporaryDirectory(prefix="partc-verify-") as name:
        found = _trained_and_compared(plan, directory.resolve(), Path(name), reference, virtual, job.device, recipe)
    return VerifyResult(
        ok=not found.failures,
        losses=found.losses,
        reference_losses=found.reference_losses,
        worst=found.worst,
        tolerance=found.tolerances[found.worst.kind],
        rounding=_rounding(plan),
        compared=len(found.differences),
        restarted=found.restarted,
    )


def _trained_and_compared(
    plan: Mapping[str, Any],
    directory: Path,
    folder: Path,
    reference: Path | None,
    virtual: bool,
    device: Wanted,
    recipe: Mapping[str, Any],
) -> _Comparison:
    """Train the package and the model, and compare them; once more from the package's values if rounding may have
    grown.
    """
    plain = reference or folder / "reference"
    if plan["repeated"]:  # the reference differs from a run of the whole batch
        plain = plain / f"{plan['microbatches']}_batches"
    runs = [_package_run(directory, folder, virtual, device, recipe)]
    if not (plain / f"step_{recipe['steps']:04d}.safetensors").exists():
        runs.append(_reference_run(directory, folder, plain, recipe))
    run_concurrently(runs)
    found = _Comparison.of_runs(plan, folder, plain, recipe)
    if not found.rounding_may_have_grown:
        return found
    values, again = folder / "values", folder / "again"
    _write_values(plan, folder / "record", plain, values, recipe["steps"])
    run_concurrently([_reference_run(directory, folder, again, recipe, values)])
    return replace(_Comparison.of_runs(plan, folder, again, recipe), restarted=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """The differences between a package's training and one of the single-device model."""

    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    differences: tuple[Difference, ...]
    tolerances: Mapping[str, float]
    restarted: bool = False

    @classmethod
    def of_runs(cls, plan: Mapping[str, Any], folder: Path, reference: Path, recipe: Mapping[str, Any]) -> _Comparison:
        """Compares all steps of the package's run in `folder` with those of the model's run in `reference`."""
        (start, _), *reference_steps = [
            load(reference / f"step_{step:04d}.safetensors") for step in range(recipe["steps"] + 1)
        ]
        losses = next(report["losses"] for report in read_reports(folder / "report") if report["logs"])
        reference_losses = [float(metadata["loss"]) for _, metadata in reference_steps]
        differences = [
            Difference(kind="loss", name="loss", rel_err=relative_error(mine, theirs, abs(theirs)), step=step + 1)
            for step, (mine, theirs) in enumerate(zip(losses, reference_losses, strict=True))
        ]
        updates = _Updates(plan, start, recipe)
        for step, (tensors, metadata) in enumerate(reference_steps):
            recorded = _recorded(plan, folder / "record", step + 1)
            expected = updates.after(recorded, tensors, json.loads(metadata.get("changed", "[]")))
            differences += _compare_step(plan, recorded, step + 1, expected, reference_losses[step])
        return cls(
            losses=tuple(losses),
            reference_losses=tuple(reference_losses),
            differences=tuple(differences),
            tolerances=TOLERANCES[_rounding(plan)],
        )

    @property
    def worst(self) -> Difference:
        """The largest difference, as a multiple of its tolerance."""
        return max(self.differences, key=lambda each: each.rel_err / self.tolerances[each.kind])

    @property
    def failures(self) -> list[Difference]:
        return [each for each in self.differences if not each.rel_err <= self.tolerances[each.kind]]

    @property
    def rounding_may_have_grown(self) -> bool:
        """Whether all differences above the tolerances are of steps after the first, which start from other values.

        Differences of parameters always count: updates are compared from the package's own gradients.
        """
        return bool(self.failures) and all(each.step > 1 and each.kind != "parameter" for each in self.failures)


def _recipe(directory: Path, arguments: Sequence[str]) -> tuple[Job, dict[str, Any]]:
    """The options of the package's run as train.py parses them, and the options that the single-device run shares."""
    try:
        job = parse(arguments, directory)
    except UsageError as error:
        raise PartcError(error.code, error.cause, help=error.help) from error
    for option in ("save", "resume", "init", "record", "report", "metrics", "tensorboard", "trace"):
        if getattr(job, option) is not None:
            raise PartcError(
                "P0504",
                f"--{option} has no place in a comparison, which starts from the seed and keeps nothing",
                help="give options of the optimizer: --optimizer, --lr, --weight-decay, --clip, --warmup",
            )
    recipe = {name: getattr(job, name) for name in ("steps", "seed", *RECIPE)}
    return job, recipe | {"clip": CLIP if job.clip is None else job.clip}


def _package_run(directory: Path, folder: Path, virtual: bool, device: Wanted, recipe: Mapping[str, Any]) -> LoggedRun:
    """The training of the package on the device."""
    arguments = [*_options(recipe), *(() if device == "auto" else ("--device", device))]
    arguments += ["--record", str(folder / "record"), "--report", str(folder / "report")]
    if (directory / "runtime" / "train" / "tuning.py").is_file():
        arguments.append("--no-tuning")  # a few steps aren't worth the time
    ranks = Mesh.parse(read_plan(directory)["mesh"]).size
    if (directory / "runtime" / "device" / "cuda_graphs.py").is_file() and (virtual or gpus() < ranks):
        arguments.append("--no-cuda-graphs")  # graphs need a GPU for each rank
    command = (
        [sys.executable, str(directory / "train.py"), "--virtual", *arguments]
        if virtual
        else torchrun_command(directory, arguments)
    )
    return LoggedRun(label="the package", command=command, output=folder / "package.txt", refusals=folder / "report")


def _reference_run(
    directory: Path, folder: Path, results: Path, recipe: Mapping[str, Any], values: Path | None = None
) -> LoggedRun:
    """The training of the single-device model on the CPU; each step starts from `values`, if there are any."""
    results.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "partc.package.reference", str(directory), str(results), json.dumps(recipe)]
    command += [] if values is None else [str(values)]
    return LoggedRun(
        label="the single-device model", command=command, environment=searching(), output=folder / "plain.txt",
        refusals=results,
    )  # fmt: skip


def _options(recipe: Mapping[str, Any]) -> Iterator[str]:
    """Yields the training options in the form of train.py's command line."""
    for name, value in recipe.items():
        for each in value if isinstance(value, list | tuple) else (value,):
            if each is not None:
                yield from (f"--{name.replace('_', '-')}", str(each))


def _rounding(plan: Mapping[str, Any]) -> str:
    """The precision that determines the tolerance.

    Gradients may be sent in fewer bits than they are computed in, and the model itself may compute in fewer bits.
    """
    command = plan.get("command", {})
    fewer = [command[name] for name in ("compress_grads", "grad_reduce") if name in command]
    return str(fewer[0] if fewer else plan.get("rounds", plan["precision"]))


Records = Sequence[Mapping[str, Tensor]]  # of one step, by rank: gradients before clipping, parameters after the update


def _recorded(plan: Mapping[str, Any], record: Path, step: int) -> Records:
    ranks = range(Mesh.parse(plan["mesh"]).size)
    return [load(record / f"step_{step:04d}_rank_{rank:03d}.safetensors")[0] for rank in ranks]


def _holders(plan: Mapping[str, Any], entry: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, int]]]:
    """Yields the ranks that hold a parameter, with their coordinates."""
    mesh = Mesh.parse(plan["mesh"])
    places = {plan["places"][stage] for stage in entry["stages"]}
    stack = entry.get("stack")
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        here = coordinate.get(PIPELINE_AXIS, 0) in places
        if here and (stack is None or _has_row(stack, coordinate, mesh)):
            yield rank, coordinate


def _has_row(stack: Mapping[str, Any], coordinate: Mapping[str, int], mesh: Mesh) -> bool:
    """Whether the rank at a coordinate holds a row of a stack. A whole table is held where its first row is."""
    (ranges,) = index_ranges(Layout.parse(stack["rows"]), coordinate, mesh.sizes)
    return any(start <= stack["row"] < end for start, end in ranges)


class _Updates:
    """Runs torch's optimizer on the package's gradients. The result must equal the package's parameters almost exactly.

    Some gradients consist of rounding errors, such as the gradient of a bias before a norm. Adam divides each gradient
    by its own size, so that the parameters of two correct trainings may differ. Updates from equal gradients are
    comparable.
    """

    def __init__(self, plan: Mapping[str, Any], start: Mapping[str, Tensor], recipe: Mapping[str, Any]) -> None:
        self._plan = plan
        self._entries = {name: entry for name, entry in plan["parameters"].items() if f"parameter/{name}" in start}
        self._values = {
            name: nn.Parameter(start[f"parameter/{name}"].clone())
            for name, entry in self._entries.items()
            if start[f"parameter/{name}"].is_floating_point()
        }
        settings = {name: value for name, value in recipe.items() if name != "seed" and name not in DATA}
        self._update = ReferenceUpdate(self._values, balance=balanced_biases(plan), **settings)
        self._changing = set(plan["updates"])

    def after(self, records: Records, reference: Mapping[str, Tensor], changed: Iterable[str]) -> dict[str, Tensor]:
        """The reference's gradients and buffers of a step, and the parameters that follow from the package's
        gradients, except those that forward has `changed` in this step or an earlier one.
        """
        self._changing |= {*changed}
        for x in self._values.values():
            x.grad = None
        trained = [name for name in self._values if f"gradient/{name}" in reference]
        for name in trained:
            whole = _whole(self._plan, records, "gradient", name, self._values[name])
            rows = reference.get(f"rows/{name}")
            self._values[name].grad = whole if rows is None else _sparse(whole, rows)
        finite = all(_is_finite(x.grad) for x in self._values.values() if x.grad is not None)
        if self._plan["precision"] == "fp16" and not finite:
            self._update.passed(updated=False)
        else:
            self._update.step()
        fixed = {
            f"parameter/{name}"
            for name, entry in self._plan["parameters"].items()
            if name in self._changing or (f"gradient/{name}" not in reference and "counted" not in entry)
        }
        found = {f"parameter/{name}": x.detach().clone() for name, x in self._values.items()}
        return {**reference, **{key: x for key, x in found.items() if key not in fixed}}


def _shard(entry: Mapping[str, Any]) -> Shard:
    """The shard of a parameter of the plan."""
    return Shard(entry["dtype"] + entry["layout"], holds=tuple(entry["shape"]), sectioned=order_of(entry))


def _whole(plan: Mapping[str, Any], records: Records, kind: str, name: str, like: Tensor) -> Tensor:
    """A whole gradient or parameter, assembled from the ranks' shards; zeros if no rank holds it."""
    entry, whole = plan["parameters"][name], torch.zeros_like(like)
    shard = _shard(entry)
    places = torch.arange(1, whole.numel() + 1).view(whole.shape)  # 0 is padding
    for rank, coordinate in _holders(plan, entry):
        mine = records[rank].get(f"{kind}/{name}")
        here = shard.local(places, Mesh.parse(plan["mesh"]).sizes, coordinate)
        if mine is not None and mine.shape == here.shape:
            whole.view(-1)[here[here > 0] - 1] = mine[here > 0].to(whole.dtype)
    return whole


def _write_values(plan: Mapping[str, Any], record: Path, reference: Path, folder: Path, steps: int) -> None:
    """Write the package's parameters and buffers after each step but the last, whole."""
    start, _ = load(reference / "step_0000.safetensors")
    folder.mkdir()
    for step in range(1, steps):
        records = _recorded(plan, record, step)
        values = {
            f"parameter/{name}": _whole(plan, records, "parameter", name, start[f"parameter/{name}"])
            for name in plan["parameters"]
            if f"parameter/{name}" in start
        }
        save(folder / f"step_{step:04d}.safetensors", values, {})


def _is_finite(gradient: Tensor) -> bool:
    return bool((gradient._values() if gradient.is_sparse else gradient).isfinite().all())


def _sparse(whole: Tensor, rows: Tensor) -> Tensor:
    """A sparse gradient with the rows of the reference, and with other rows that are not zero, which are wrong."""
    others = whole.flatten(1).ne(0).any(1).nonzero()[:, 0]
    rows = torch.cat((rows, others)).unique()
    return torch.sparse_coo_tensor(rows[None], whole[rows], whole.shape, is_coalesced=True, check_invariants=False)


def _compare_step(
    plan: Mapping[str, Any], records: Records, step: int, reference: Mapping[str, Tensor], loss: float
) -> Iterator[Difference]:
    """Compare every rank's gradients and parameters of a step with slices of the reference."""
    sizes, rounding = Mesh.parse(plan["mesh"]).sizes, _rounding(plan)
    measure = root_mean_square if rounding in MIXED else largest_magnitude
    largest = {
        kind: max((measure(x) for name, x in reference.items() if name.startswith(kind)), default=0.0)
        for kind in ("gradient", "parameter")
    }
    floors = {kind: SMALLEST_SCALE[rounding] * magnitude for kind, magnitude in largest.items()}
    if largest["parameter"]:
        noise = LOSS_NOISE.get(rounding, 0.0) * abs(loss) / largest["parameter"]
        floors["gradient"] = max(floors["gradient"], noise / TOLERANCES[rounding]["gradient"])
    for name, entry in plan["parameters"].items():
        shard = _shard(entry)
        trained = entry["trainable"] or f"gradient/{name}" in reference
        for rank, coordinate in _holders(plan, entry):
            for kind in ("gradient", "parameter") if trained else ("parameter",):
                whole = _reference_tensor(reference, kind, name, shard)
                theirs = shard.local(whole, sizes, coordinate)
                mine = records[rank].get(f"{kind}/{name}")
                if mine is None or mine.shape != theirs.shape:
                    error = math.inf
                else:
                    scale = max(measure(whole), floors[kind], _spread(reference, kind, name, measure))
                    error = relative_error(difference(mine, theirs, measure), 0.0, scale)
                # In addition to the reference's own.
                own = kind == "parameter" and (not trained or name in plan["updates"])
                reported_kind = "constant" if own else kind
                yield Difference(kind=reported_kind, name=name, rel_err=error, step=step, rank=rank)


def _spread(reference: Mapping[str, Tensor], kind: str, name: str, measure: Callable[[Tensor], float]) -> float:
    """The scale of a batch norm's running mean: its running standard deviation, since the mean may be pure rounding."""
    place, found, _ = name.rpartition("running_mean")
    variance = reference.get(f"{kind}/{place}running_var") if found else None
    return 0.0 if variance is None else math.sqrt(measure(variance))


def _reference_tensor(reference: Mapping[str, Tensor], kind: str, name: str, shard: Shard) -> Tensor:
    """The reference's tensor. The gradient of a parameter on which the loss does not depend is zero."""
    if f"parameter/{name}" not in reference:
        raise PartcError(
            "P0502",
            f"model.py makes no parameter {name!r}, which the plan has",
            help="compile again: model.py or its options have changed since",
        )
    if f"{kind}/{name}" not in reference:
        return torch.zeros(shard.shape, dtype=shard.dtype)
    return reference[f"{kind}/{name}"]
