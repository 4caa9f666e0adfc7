"""A checkpoint's manifest: its tensors, their boxes in each file, and every file's digest.

A checkpoint is a folder `step_00000300/`: safetensors files by rank, and `manifest.json`. It is written under a
temporary name and renamed when complete, so a folder with this name is complete.

torch.distributed.checkpoint can read it, with its own reader for safetensors files (`HuggingFaceStorageReader`): the
metadata of each file, in that reader's format, states the positions of its tensors in the whole. That reader allows one
box of a tensor per file, so a rank's further boxes (of a strided shard) are in further files, `rank_003_1.safetensors`.
Parameters have their own names, the optimizer's state is `exp_avg/NAME`; a tied weight is stored under its first name
only (load with `DefaultLoadPlanner(allow_partial_load=True)`). partc does not write with torch.distributed.checkpoint,
because its `.metadata` is a pickle, and its planning needs a process group of all ranks, which a package does not make.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from ..documents import (
    FileName,
    Malformed,
    Natural,
    Positive,
    at_least,
    contents,
    decoded,
    file_name,
    more_than,
    parsed,
    regular,
)
from ..errors import UsageError
from ..layout import DTYPES, short_name
from ..plan import Mesh, Option, Precision
from .boxes import Box, cover_fault
from .safetensors import BadTensorFile, Shape, TensorFile

FORMAT = 1
NAME = "manifest.json"
LOSS_SCALE = "loss_scale"  # a tensor without a parameter: the scale, and the updates since it changed
LEFT_OUT = "left_out/"  # prefix of the names of each rank's compression errors
_ADAMW = (("exp_avg", "exp_avg_sq", "step"),)  # the states in checkpoints of format 1
_PREFIX = "step_"
_LONG = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


@dataclass(slots=True)
class Saved:
    """A tensor of the checkpoint: its whole type, and the files with boxes of it."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[tuple[str, Box]] = field(default_factory=list)
    key: str = ""  # its name in the files, if different


@dataclass(slots=True, kw_only=True)
class Manifest:
    """`run` describes the training: seed, optimizer, learning rate, mesh."""

    step: int
    run: dict[str, Any]
    tensors: dict[str, Saved]
    files: dict[str, tuple[int, str]]  # bytes and sha256

    def text(self) -> str:
        tensors = {
            name: {
                "dtype": saved.dtype,
                "shape": saved.shape,
                "boxes": [[file, box.offsets, box.sizes] for file, box in saved.boxes],
            }
            for name, saved in self.tensors.items()
        }
        content = {"step": self.step, "run": self.run, "files": self.files, "tensors": tensors}
        lines = [f'  "partc_checkpoint": {FORMAT}', f'  "sha256": "{_digest(content)}"']
        for key, value in content.items():
            if isinstance(value, dict) and key != "run":
                items = ",\n".join(f"    {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items())
                lines.append(f'  "{key}": {{\n{items}\n  }}')
            else:
                lines.append(f'  "{key}": {json.dumps(value)}')
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _dtype(name: str) -> str:
    return "" if name in _LONG else f"none of {', '.join(_LONG)}"


def _word(name: str) -> str:
    return "" if name.isidentifier() else "no name of a state"


def _hex(digest: str) -> str:
    return "" if re.fullmatch("[0-9a-f]{64}", digest) else "no sha256 digest"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The fields of `Manifest.run`; older packages wrote fewer."""

    seed: int
    optimizer: str
    states: tuple[tuple[Annotated[str, _word], ...], ...] | None = None
    mesh: Mesh
    accumulate: Positive = 1
    lr: Annotated[float, at_least(0)] = 0.0
    clip: Annotated[float, more_than(0)] | None = None
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Natural = 0
    min_lr: Annotated[float, at_least(0)] = 0.0
    weight_decay: Annotated[float, at_least(0)] | None = None
    no_decay: tuple[str, ...] = ()
    group: tuple[str, ...] = ()
    name: str | None = None
    microbatches: Positive | None = None
    precision: Precision | None = None
    options: dict[str, Option] | None = None
    init: str | None = None
    data: str | None = None
    data_dtype: str | None = None
    data_labels: Literal["next", "same"] | None = None
    position: str = ""  # the position of the data, if the number of batches does not determine it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    dtype: Annotated[str, _dtype]
    shape: Shape
    boxes: tuple[tuple[FileName, tuple[Natural, ...], tuple[Positive, ...]], ...]  # offsets and sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """The schema of the file, without its format and digest."""

    step: Natural
    run: _Run
    files: dict[str, tuple[Natural, Annotated[str, _hex]]]
    tensors: dict[str, _Tensor]


def states_in(run: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """The possible sets of states that the optimizer keeps: each parameter has the tensors of one set, or none yet."""
    found = run.get("states")
    if found is None:
        return _ADAMW if run["optimizer"] == "adamw" else ()
    return tuple(map(tuple, found))


def folder_name(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder; None for any other name."""
    digits = path.name.removeprefix(_PREFIX)
    return int(digits) if path.name.startswith(_PREFIX) and re.fullmatch("[0-9]{8,18}", digits) else None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first, whole or damaged. Raises UsageError P0523."""
    try:
        found = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        help = "name the folder that --save was given"
        raise UsageError("P0523", f"{folder} cannot be read: {error.strerror}", help) from None
    return [path for _, path in sorted(found, reverse=True)]


def read(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all present with their sizes. Raises UsageError P0524."""
    try:
        manifest = _manifest(parsed(contents(path / NAME, within=path)))
    except Malformed as error:
        raise damaged(path, f"{NAME} {error}") from None
    except RecursionError:
        raise damaged(path, f"{NAME} is nested too deeply") from None
    if step_of(path) not in (None, manifest.step):
        raise damaged(path, f"{NAME} is of step {manifest.step}")
    for name, (size, _) in manifest.files.items():
        try:
            with regular(path / name, within=path) as file:
                found = os.fstat(file.fileno()).st_size
        except Malformed as error:
            raise damaged(path, f"{name!r} {error}") from None
        except FileNotFoundError:
            raise damaged(path, f"{name} is missing") from None
        except (OSError, RuntimeError) as error:
            raise damaged(path, f"{name!r} cannot be read: {getattr(error, 'strerror', error)}") from None
        if found != size:
            raise damaged(path, f"{name} has {found:,} bytes of {size:,}")
    return manifest


def _manifest(content: Any) -> Manifest:
    """Decode a manifest. Raises Malformed."""
    if not isinstance(content, dict) or "partc_checkpoint" not in content:
        raise Malformed("is not that of a partc checkpoint")
    version, digest = content.pop("partc_checkpoint"), content.pop("sha256", None)
    if version != FORMAT or isinstance(version, bool):
        raise Malformed(f"has format {version!r}; this package reads {FORMAT}")
    if digest != _digest(content):
        raise Malformed("has been changed")
    try:
        found = decoded(_Content, content)
    except Malformed as error:
        raise Malformed(f"is not of its form: {error}") from None
    tensors = {
        name: Saved(each.dtype, each.shape, [(file, Box(offsets, sizes)) for file, offsets, sizes in each.boxes])
        for name, each in found.tensors.items()
    }
    manifest = Manifest(step=found.step, run=content["run"], files=found.files, tensors=tensors)
    for why in _contradictions(manifest):
        raise Malformed(f"contradicts itself: {why}")
    return manifest


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """Faults that the schema does not cover: missing files, tensors not covered by boxes, incomplete states."""
    for name in manifest.files:
        if why := file_name(name):
            yield f"file {name!r} is {why}"
    held: dict[str, set[str]] = {}
    for name, saved in manifest.tensors.items():
        for file, _ in saved.boxes:
            if file not in manifest.files:
                yield f"{name!r} has a box in {file!r}, which is none of its files"
            if name in held.setdefault(file, set()):
                yield f"{file} has two boxes of {name!r}"
            held[file].add(name)
        if why := cover_fault([box for _, box in saved.boxes], saved.shape):
            yield f"{name!r}: {why}"
    for file in manifest.files:
        if file not in held:
            yield f"{file} has no box of any tensor"
    yield from _lonely_states(manifest)


def _lonely_states(manifest: Manifest) -> Iterator[str]:
    """Parameters with only a part of a set of states, or with states whose shape is not theirs (up to sizes of 1)."""
    tensors, sets = manifest.tensors, states_in(manifest.run)
    states = sorted({state for each in sets for state in each})
    for state in states:
        prefix = f"{state}/"
        for name in tensors:
            if name.startswith(prefix) and name.removeprefix(prefix) not in tensors:
                yield f"it has {name!r} and no {name.removeprefix(prefix)!r}"
    for name in tensors:
        found = [state for state in states if f"{state}/{name}" in tensors]
        if found and all(set(found) != set(each) for each in sets):
            yield f"{name!r} has {' and '.join(found)}, of {' or '.join(', '.join(each) for each in sets)}"
        for state in found:
            saved = tensors[f"{state}/{name}"]
            if saved.shape != () and (state == "step" or not _reduced(saved.shape, tensors[name].shape)):
                yield f"'{state}/{name}' has shape {list(saved.shape)}, {name!r} {list(tensors[name].shape)}"
            if not _LONG[saved.dtype].is_floating_point:
                yield f"'{state}/{name}' has {saved.dtype}"
    scale = tensors.get(LOSS_SCALE)
    if (
        scale is not None
        and manifest.run.get("precision") == "fp16"
        and (scale.dtype, scale.shape) != ("float64", (2,))
    ):
        yield f"{LOSS_SCALE!r} is {scale.dtype}{list(scale.shape)}"
    for name, saved in tensors.items():
        if name.startswith(LEFT_OUT) and (saved.dtype != "float32" or len(saved.shape) != 2):
            yield f"{name!r} is {saved.dtype}{list(saved.shape)}"


def _reduced(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(shape) == len(whole) and all(size in (1, full) for size, full in zip(shape, whole, strict=True))


def changed_file(path: Path, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> str:
    """The first file whose digest differs, among this rank's share; '' if there is none."""
    for name in sorted(manifest.files)[share[0] :: share[1]]:
        digest = hashlib.sha256()
        try:
            with regular(path / name, within=path) as file:
                while block := file.read(1 << 22):
                    digest.update(block)
        except (OSError, RuntimeError, Malformed) as error:
            return f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"
        if digest.hexdigest() != manifest.files[name][1]:
            return f"the content of {name} has changed"
        if why := _misdescribed(path, manifest, name):
            return why
    return ""


def _misdescribed(path: Path, manifest: Manifest, file: str) -> str:
    """The difference between a file's own header and the manifest; '' if there is none."""
    try:
        described = TensorFile(path / file).described
    except (OSError, BadTensorFile) as error:
        return str(error)
    listed = {
        saved.key or name: (_LONG[saved.dtype], box.sizes)
        for name, saved in manifest.tensors.items()
        for place, box in saved.boxes
        if place == file
    }
    for name in listed.keys() | described.keys():
        mine, theirs = (_typed(each.get(name)) for each in (listed, described))
        if mine != theirs:
            return f"{name!r} is {theirs} in {file}, {mine} in {NAME}"
    return ""


def _typed(found: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "absent" if found is None else f"{short_name(found[0])}{list(found[1])}"


def damaged(path: Path, why: str) -> UsageError:
    return UsageError(
        "P0524", f"the checkpoint {path} is damaged: {why}", "resume from an older one; nothing was changed", alike=True
    )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
