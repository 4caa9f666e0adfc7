"""A checkpoint's manifest: which tensors it has, which boxes of them stand in which file, and every file's digest.

A checkpoint is a folder `step_00000300/`: safetensors files by rank, and `manifest.json`. It is
written under another name and renamed once everything is there, so a folder of this name is complete.

torch.distributed.checkpoint reads it too, with its own reader for safetensors files
(`HuggingFaceStorageReader`): each file says, in the metadata which that reader looks for, where its
tensors stand in the whole. There a file has one box of a tensor, so a rank's further boxes (of a strided
shard) stand in further files, `rank_003_1.safetensors`. Parameters have their own names, what the optimizer
keeps of them `exp_avg/NAME`; a tied weight stands under its first name alone (load with
`DefaultLoadPlanner(allow_partial_load=True)`). partc doesn't write with torch.distributed.checkpoint, for
its `.metadata` is a pickle, and planning needs a process group of all ranks, which a package doesn't make.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .boxes import Box
from .errors import UsageError

FORMAT = 1
NAME = "manifest.json"
LOSS_SCALE = "loss_scale"  # a tensor that is of no parameter: its value, and the updates since it changed
LEFT_OUT = "left_out/"  # before the names of what each rank's compressed sums of gradients have left out
_PREFIX = "step_"


@dataclass(slots=True)
class Saved:
    """A tensor of the checkpoint: what it is as a whole, and the files that have boxes of it."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[tuple[str, Box]] = field(default_factory=list)
    key: str = ""  # its name in the files, where that is another


@dataclass(slots=True, kw_only=True)
class Manifest:
    """`run` is what the training was: seed, optimizer, learning rate, mesh."""

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


def folder_name(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder; None for any other name."""
    digits = path.name.removeprefix(_PREFIX)
    return int(digits) if path.name.startswith(_PREFIX) and len(digits) >= 8 and digits.isdecimal() else None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first, whatever state they are in."""
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found, reverse=True)]


def read(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there, with their sizes. Raises UsageError P0524."""
    try:
        content = json.loads((path / NAME).read_text(encoding="utf-8"))
    except OSError as error:
        raise damaged(path, f"{NAME}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"{NAME} is not JSON: {error}") from None
    if not isinstance(content, dict) or "partc_checkpoint" not in content:
        raise damaged(path, f"{NAME} is not that of a partc checkpoint")
    version, digest = content.pop("partc_checkpoint"), content.pop("sha256", None)
    if version != FORMAT:
        raise damaged(path, f"{NAME} has format {version!r}; this package reads {FORMAT}")
    if digest != _digest(content):
        raise damaged(path, f"{NAME} has been changed")
    manifest = Manifest(
        step=content["step"],
        run=content["run"],
        files={name: (size, digest) for name, (size, digest) in content["files"].items()},
        tensors={name: _saved(entry) for name, entry in content["tensors"].items()},
    )
    for name, (size, _) in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise damaged(path, f"{name} is missing")
        if file.stat().st_size != size:
            raise damaged(path, f"{name} has {file.stat().st_size:,} bytes of {size:,}")
    return manifest


def changed_file(path: Path, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> str:
    """The first file that isn't what was written, of those that are this rank's to check; '' if none."""
    for name in sorted(manifest.files)[share[0] :: share[1]]:
        digest = hashlib.sha256()
        with (path / name).open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
        if digest.hexdigest() != manifest.files[name][1]:
            return f"the content of {name} has changed"
    return ""


def damaged(path: Path, why: str) -> UsageError:
    return UsageError(
        "P0524", f"the checkpoint {path} is damaged: {why}", "resume from an older one; nothing was changed", alike=True
    )


def _saved(entry: Mapping[str, Any]) -> Saved:
    boxes = [(file, Box(tuple(offsets), tuple(sizes))) for file, offsets, sizes in entry["boxes"]]
    return Saved(entry["dtype"], tuple(entry["shape"]), boxes)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
