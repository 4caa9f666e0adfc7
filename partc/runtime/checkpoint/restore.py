"""Reading checkpoints: choosing one, checking that it is whole and fits the model, and reading a rank's parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..layout import Shard, short_name
from ..processes.agreement import Together
from .boxes import Box, pieces
from .manifest import LEFT_OUT, LOSS_SCALE, Manifest, changed_file, checkpoints, damaged, read, states_in, step_of
from .safetensors import BadTensorFile, TensorFile

Say = Callable[[str], None]


class Checkpoint:
    """A whole checkpoint; tensors are read from it box by box."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.passed_over: tuple[str, ...] = ()  # newer but damaged checkpoints in the same folder
        self.step = manifest.step
        self.run = manifest.run
        self.tensors = manifest.tensors
        self._files: dict[str, TensorFile] = {}

    def check_fits(self, plan: Mapping[str, Any]) -> None:
        """Raise UsageError P0525 if the plan's parameters differ from the checkpoint's."""
        for name, entry in plan["parameters"].items():
            if not entry["stages"]:  # unused, so that no rank has it
                continue
            saved = self.tensors.get(name)
            wanted = f"{entry['dtype']}{entry['shape']}"
            if saved is None:
                raise self._foreign(f"it has no {name!r}, which is {wanted} here")
            found = f"{short_name(getattr(torch, saved.dtype))}{list(saved.shape)}"
            if found != wanted:
                raise self._foreign(f"its {name!r} is {found}, here it is {wanted}")
        states = {state for each in states_in(self.run) for state in each}
        known = {n for parameter in plan["parameters"] for n in (parameter, *(f"{s}/{parameter}" for s in states))}
        for name in self.tensors:
            if name not in known and name != LOSS_SCALE and not name.startswith(LEFT_OUT):
                raise self._foreign(f"it has {name!r}, which is unknown here")

    def states(self, name: str) -> list[str]:
        """The optimizer's states of a parameter: `exp_avg`, ..."""
        states = sorted({state for each in states_in(self.run) for state in each})
        return [state for state in states if f"{state}/{name}" in self.tensors]

    def part(self, name: str, shard: Shard, sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> Tensor:
        """A rank's part of a tensor under any layout; elements that only pad the tensor are zero."""
        saved = self.tensors[name]
        part = torch.zeros(shard.local_shape(sizes), dtype=getattr(torch, saved.dtype))
        for piece in pieces(shard.dims, saved.shape, sizes, coordinate, shard.sectioned):
            self._read(name, piece.whole, part[piece.here.slices])
        return part

    def whole(self, name: str) -> Tensor:
        """A whole tensor of the model."""
        saved = self.tensors[name]
        tensor = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
        self._read(name, Box((0,) * len(saved.shape), saved.shape), tensor)
        return tensor

    def close(self) -> None:
        """Close the files; reading opens them again."""
        self._files.clear()

    def _read(self, name: str, wanted: Box, target: Tensor) -> None:
        saved = self.tensors[name]
        left = math.prod(wanted.sizes)
        for file, box in saved.boxes:
            common = wanted.meet(box)
            if common is None:
                continue
            source = self._file(file).tensor(saved.key or name, common.seen_from(box.offsets).slices)
            if source.dtype != target.dtype:
                raise damaged(self.path, f"{name} is {short_name(source.dtype)} in {file}")
            target[common.seen_from(wanted.offsets).slices] = source
            left -= math.prod(common.sizes)
        if left:
            raise damaged(self.path, f"{name} has {left:,} elements too few")

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            try:
                self._files[name] = TensorFile(self.path / name)
            except (OSError, BadTensorFile) as error:
                raise damaged(self.path, f"{name} cannot be read: {error}") from None
        return self._files[name]

    def _foreign(self, why: str) -> UsageError:
        return UsageError(
            "P0525",
            f"the checkpoint {self.path} is of another model: {why}",
            "resume with the model, options and precision that it was trained with",
            alike=True,
        )


def open_checkpoint(path: Path, together: Together, *, within: Path | None = None) -> Checkpoint:
    """A checkpoint after its files have been checked against their digests, each by one rank. Raises P0524.

    A checkpoint that was found in a folder must lie `within` it: links to other places are refused.
    """
    manifest = None
    try:
        if within is not None and not path.resolve().is_relative_to(within.resolve()):
            raise damaged(path, "it is a link that leaves the folder")
        manifest, problem = read(path), ""
    except UsageError as error:  # perhaps on this rank alone
        problem = error.cause
    problem = together.first_problem(problem)
    if not problem and manifest is not None:
        changed = changed_file(path, manifest, (together.rank, together.size))
        problem = together.first_problem(damaged(path, changed).cause if changed else "")
        if not problem:
            return Checkpoint(path, manifest)
    raise UsageError("P0524", problem, "resume from an older one; nothing was changed", alike=True)


def newest(target: Path, together: Together, *, needed: bool, say: Say) -> Checkpoint | None:
    """The checkpoint `target`, or the newest whole one in the folder `target`.

    Returns None if there is no checkpoint, unless one is `needed`. Damaged ones are skipped and reported to `say`.
    Raises UsageError P0523 and P0524.
    """
    if step_of(target) is not None:
        if together.broadcast("" if target.is_dir() else "absent"):
            raise _absent(target, "there is no such checkpoint")
        return open_checkpoint(target, together)
    problem, listed = "", ""
    if together.rank == 0:
        try:
            listed = "\n".join(path.name for path in checkpoints(target))
        except UsageError as error:
            problem = error.cause
    problem = together.broadcast(problem)
    if problem:
        raise UsageError("P0523", problem, "name the folder that --save was given", alike=True)
    names = together.broadcast(listed).split()
    for index, name in enumerate(names):
        try:
            found = open_checkpoint(target / name, together, within=target)
            found.passed_over = tuple(names[:index])
            return found
        except UsageError as error:
            say(f"passed over: {error.cause}")
    if names:
        why = f"none of the {len(names)} checkpoints in {target} is whole"
        raise UsageError("P0524", why, "nothing was changed; start anew with another --save folder", alike=True)
    if needed:
        raise _absent(target, "it has no checkpoints")
    return None


def _absent(target: Path, why: str) -> UsageError:
    return UsageError(
        "P0523",
        f"nothing to resume from in {target}: {why}",
        "name the folder that --save was given, or one of its step_ folders",
        alike=True,
    )
