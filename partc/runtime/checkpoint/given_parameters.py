"""Initial parameters from safetensors files: a rank reads its parts of a whole model's state dict."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..documents import FileName, Malformed, contents, decoded, parsed
from ..errors import UsageError
from ..layout import DTYPES, short_name
from ..processes.agreement import Together
from .boxes import Box
from .manifest import Manifest, Saved
from .restore import Checkpoint
from .safetensors import BadTensorFile, Described, TensorFile

INDEX = "model.safetensors.index.json"  # Hugging Face's list of a large model's files


@dataclass(frozen=True, slots=True)
class _Index:
    """The schema of an index; it allows additional fields."""

    weight_map: dict[str, FileName]  # tensor -> file


State = Callable[[], Mapping[str, torch.dtype]]


def initial_checkpoint(path: Path, plan: Mapping[str, Any], state: State, together: Together) -> Checkpoint:
    """The checkpoint to start from, once all ranks agree that it fits. Raises UsageError P0527."""
    found = None
    try:
        found, problem = under_plan_names(path, plan, state), ""
    except UsageError as error:  # possibly on this rank only
        problem = error.cause
    problem = together.first_problem(problem)
    if problem or found is None:
        raise UsageError("P0527", problem, _HELP, alike=True)
    return found


def under_plan_names(path: Path, plan: Mapping[str, Any], state: State) -> Checkpoint:
    """The tensors of a state dict under the plan's names.

    `path` is a file, an index of files, or a folder with either under its usual name. Tied weights may appear under any
    of their names. `state` has the model's names and dtypes in state dicts; buffers that it lacks may be missing.
    Raises UsageError P0527.
    """
    places = _places(path)
    tensors: dict[str, Saved] = {}
    known: set[str] = set()
    for name, entry in plan["parameters"].items():
        names = (name, *entry["aliases"])
        known.update(names)
        here = next((each for each in names if each in places), None)
        if here is None:
            if entry["stages"] and (entry["trainable"] or name in state()):
                raise _error(path, f"it has no {name!r}, which is {entry['dtype']}{entry['shape']} here")
            continue
        file, (dtype, shape) = places[here]
        if shape != tuple(entry["shape"]):
            raise _error(path, f"its {here!r} has shape {list(shape)}, here it is {entry['shape']}")
        if not _widens(dtype, DTYPES[entry["dtype"]]):
            raise _error(path, f"its {here!r} is {short_name(dtype)}, which {entry['dtype']} here cannot hold exactly")
        box = Box((0,) * len(shape), shape)
        tensors[name] = Saved(
            str(dtype).removeprefix("torch."), shape, [(os.path.relpath(file, path.parent), box)], here
        )
    for name in places:
        if name not in known and name not in state():
            raise _error(path, f"it has {name!r}, which the model doesn't")
    return Checkpoint(path.parent, Manifest(step=0, run={}, tensors=tensors, files={}))


_HELP = "give the state dict of the same model, as safetensors; plan.json has its names and shapes"


def _places(path: Path) -> dict[str, tuple[Path, Described]]:
    """All given tensors by name: the file, type and shape of each."""
    file = path
    if path.is_dir():
        usual = [path / INDEX, path / "model.safetensors"]
        file = next((each for each in usual if each.is_file()), usual[1])
    if file.suffix != ".json":
        return {name: (file, described) for name, described in _described(path, file).items()}
    try:
        index = decoded(_Index, parsed(contents(file)), loose=True).weight_map
    except Malformed as error:
        raise _error(path, f"{file} is not an index of safetensors files: it {error}") from None
    places: dict[str, tuple[Path, Described]] = {}
    for shard in sorted(set(index.values())):
        found = _described(path, _shard(path, file.parent, shard))
        for name, described in found.items():
            if index.get(name) != shard:
                raise _error(path, f"{shard} has {name!r}, which the index has {_place_of(index, name)}")
            places[name] = file.parent / shard, described
    missing = next((name for name in index if name not in places), None)
    if missing is not None:
        raise _error(path, f"{index[missing]} has no {missing!r}, which the index has there")
    return places


def _place_of(index: Mapping[str, str], name: str) -> str:
    return f"in {index[name]}" if name in index else "nowhere"


def _shard(path: Path, folder: Path, name: str) -> Path:
    """A file named by an index: in the index's folder, or a link to `blobs` as in Hugging Face's cache."""
    roots = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        roots.append(folder.resolve().parent.parent / "blobs")
    try:
        leads = (folder / name).resolve()
    except RuntimeError as error:  # circular links
        raise _error(path, f"{name} cannot be read: {error}") from None
    if leads.parent not in roots:
        raise _error(path, f"{name} is a link that leaves the folder")
    return folder / name


def _described(path: Path, file: Path) -> Mapping[str, Described]:
    try:
        return TensorFile(file).described
    except OSError as error:
        raise _error(path, f"{file} cannot be read: {error.strerror}") from None
    except (BadTensorFile, ValueError, RuntimeError) as error:
        raise _error(path, str(error)) from None


def _widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether the conversion preserves every value."""
    if source == target:
        return True
    floating = source.is_floating_point and target.is_floating_point
    return floating and torch.promote_types(source, target) == target


def _error(path: Path, why: str) -> UsageError:
    return UsageError("P0527", f"{path} does not fit the model: {why}", _HELP)
