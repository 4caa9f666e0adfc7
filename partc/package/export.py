"""Exporting a checkpoint to plain PyTorch: the model's own state dict, in one safetensors file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partc.errors import PartcError
from partc.package.launch import read_package
from partc.runtime.checkpoint.given_parameters import under_plan_names
from partc.runtime.checkpoint.restore import Checkpoint, newest
from partc.runtime.checkpoint.safetensors import Described, write
from partc.runtime.errors import UsageError
from partc.runtime.first_steps import FirstSteps
from partc.runtime.layout import DTYPES
from partc.runtime.processes.agreement import Together
from partc.runtime.torch_private import lone_store
from partc.runtime.train.data import load_model_file
from partc.runtime.train.init import initialise, state_dtypes, state_entries
from partc.runtime.whole_files import replacing


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The document that `partc export` prints."""

    step: int
    tensors: int
    bytes: int
    untrained: tuple[str, ...]  # tensors that the loss does not use, with their initial values


def export(
    directory: Path,
    checkpoint: Path,
    target: Path,
    *,
    init: Path | None = None,
    say: Callable[[str], None] = print,
) -> Exported:
    """Write the state dict of a package's checkpoint, with one tensor at a time in memory.

    The file contains all names of the model's own `state_dict()`, tied weights under each of their names, so that
    `load_state_dict` accepts it. The format has no complex numbers of fp64: they are written as pairs of real numbers,
    which torch.view_as_complex turns back. `checkpoint` is a checkpoint, or a folder of checkpoints, of which the
    newest complete one is used. `init` is the file that the training started from, if any: it supplies parameters that
    the loss does not use. Raises PartcError P0503, P0523 to P0525, P0527, P0601 and P0602.
    """
    plan = read_package(directory)
    if target.exists():
        raise PartcError("P0601", f"{target} exists already", help="name another file with --safetensors")
    try:
        source = newest(checkpoint, Together(lone_store(), 0, 1), needed=True, say=say)
        assert source is not None
        source.check_fits(plan)
        return _write(directory, plan, source, target, init, say)
    except UsageError as error:
        raise PartcError(error.code, error.cause, help=error.help) from None


def _write(
    directory: Path,
    plan: Mapping[str, Any],
    source: Checkpoint,
    target: Path,
    init: Path | None,
    say: Callable[[str], None],
) -> Exported:
    module = load_model_file((directory / "model.py").resolve())
    entries = state_entries(module, plan["options"])
    state = {name: dtype for name, (dtype, own) in entries.items() if own}
    for name in sorted(entries.keys() - state.keys()):
        say(f"the file leaves out {name}, which the state dict computes")
    steps = FirstSteps.of_plan(plan)
    for value in () if steps is None else steps.values:
        if value.persistent and value.name in source.tensors:
            state[value.name] = getattr(torch, source.tensors[value.name].dtype)
    first = {alias: name for name, entry in plan["parameters"].items() for alias in (name, *entry["aliases"])}
    named = {name: own for name, (_, own) in entries.items()}  # entries that hooks rename -> the model's own names
    first |= {name: first[own] for name, own in named.items() if own in first}
    untrained = tuple(name for name in state if first.get(name) not in source.tensors)
    initial = _initial(module, plan, source, tuple(named.get(name, name) for name in untrained), init)
    values = {name: initial[own] for name in untrained if (own := named.get(name, name)) in initial}
    described: dict[str, Described] = {}
    for name in state:
        saved = source.tensors.get(first.get(name, ""))
        if name in values:
            described[name] = values[name].dtype, tuple(values[name].shape)
        elif saved is not None:
            described[name] = getattr(torch, saved.dtype), saved.shape
        if state[name].is_complex and described[name][0] == torch.float32:  # the format has no larger complex numbers
            described[name] = torch.complex64, described[name][1][:-1]
    # Tensors with wide elements come first, so that each tensor is aligned to its element's size.
    described = dict(sorted(described.items(), key=lambda item: -item[1][0].itemsize))

    def tensors() -> Iterator[Tensor]:
        for name in described:
            x = values[name] if name in values else source.whole(first[name])
            yield torch.view_as_complex(x) if described[name][0].is_complex else x

    try:
        with replacing(target) as file:
            write(file, described, tensors(), {"format": "pt"})
    except OSError as error:
        raise PartcError(
            "P0602", f"{target} cannot be written: {error.strerror}", help="give a writable place with room"
        ) from error
    size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in described.values())
    return Exported(step=source.step, tensors=len(described), bytes=size, untrained=untrained)


def _initial(
    module: Any, plan: Mapping[str, Any], source: Checkpoint, names: tuple[str, ...], init: Path | None
) -> dict[str, Tensor]:
    """The initial values of `names` in the package's dtypes, from the training's --init file or else from the seed."""
    found: dict[str, Tensor] = {}
    if not names:
        return found
    held = {alias: entry["dtype"] for name, entry in plan["parameters"].items() for alias in (name, *entry["aliases"])}
    if source.run.get("init") and init is None:  # a checkpoint names no files to read
        raise PartcError(
            "P0527",
            f"{names[0]!r} is as it was in the file that the training started from: {source.run['init']!r}",
            help="add --init with that file",
        )
    if init is not None:
        state = state_dtypes(module, plan["options"])
        file = under_plan_names(init, plan, lambda: state)
        first = {alias: name for name, entry in plan["parameters"].items() for alias in (name, *entry["aliases"])}
        found = {name: file.whole(first[name]) for name in names if first.get(name) in file.tensors}
    left = [name for name in names if name not in found]
    if left:
        initialise(module, plan["options"], source.run["seed"], left, found.__setitem__, size=None)
    return {name: x.to(DTYPES[held[name]]) if name in held else x for name, x in found.items()}
