"""Writing checkpoints: every rank writes its own boxes, in a thread, while training continues.

`save` copies to host memory and returns. All ranks write into one temporary folder next to the checkpoint's final path
and count themselves in the ranks' store. The last rank merges the notes of all ranks into one manifest and renames the
folder: a checkpoint is complete or absent. manifest.py describes the contents. Training waits for it only before a step
whose loss would exceed the slack (`behind`), and before the next save.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from ..device.pinned import pinned
from ..documents import decoded, parsed
from ..errors import PeerLost, UsageError
from ..layout import Shard
from ..torch_private import clone_store
from .boxes import Box, Piece, pieces, writes_tensor
from .manifest import NAME, Manifest, Saved, checkpoints, folder_name, read
from .safetensors import write


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor or shard of this rank, with its cut and the pipeline ranks that have it."""

    shard: Shard
    tensor: Tensor
    holders: tuple[int, ...] = (0,)

    @property
    def shape(self) -> tuple[int, ...]:
        """The model's own shape, without padding."""
        return self.shard.holds or self.shard.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """The identity of this rank."""

    rank: int
    world_size: int
    sizes: Mapping[str, int]
    coordinate: Mapping[str, int]


Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """A rank's note about its files: sizes, digests, and the boxes of tensors in them."""

    files: dict[str, tuple[int, str]]
    boxes: tuple[tuple[str, str, Numbers, str, Numbers, Numbers], ...]  # name, dtype, shape, file, offsets, sizes
    empty: tuple[tuple[str, str, Numbers], ...]  # name, dtype, shape
    position: str  # the position of its data; '' on ranks without data


class Saver:
    """Writes checkpoints into `folder` and keeps the newest `keep` of them.

    `attempt` is the same on all ranks and different in every run, so that files of an interrupted run are not mixed up
    with this one's.
    """

    def __init__(
        self, folder: Path, *, keep: int, place: RankPosition, store: Store, attempt: str, run: Mapping[str, Any]
    ) -> None:
        self.folder = folder
        self.saved: int | None = None  # the last step that was handed over
        self._keep = keep
        self._place = place
        self._begun: int | None = None  # the last step passed to `save`, if its checkpoint may be incomplete
        self._store = clone_store(store)
        self._attempt = attempt
        self._run = dict(run)
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(self, step: int, held: Mapping[str, Held], *, position: str = "") -> None:
        """Start writing the state after `step` steps, and the position of the data.

        Raises UsageError P0526 if the previous save failed.
        """
        self.wait()
        self.saved = self._begun = step
        mine = {name: self._own_pieces(name, each) for name, each in held.items()}
        wholes = {name: (str(each.tensor.dtype).removeprefix("torch."), each.shape) for name, each in held.items()}
        self._pin(held, mine)
        copies = {
            name: [(piece, self._copied(name, index, piece, held[name].tensor)) for index, piece in enumerate(found)]
            for name, found in mine.items()
            if found
        }
        ready = torch.cuda.Event() if any(each.tensor.is_cuda for each in held.values()) else None
        if ready is not None:
            ready.record()
        self._thread = threading.Thread(
            target=self._write_files, args=(step, copies, wholes, ready, position), daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until this rank's files are written, and the checkpoint is complete if this rank was the last."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if isinstance(self._failure, DistError):
            raise PeerLost(str(self._failure)) from self._failure
        if isinstance(self._failure, OSError) and self._failure.errno != errno.ENOMEM:
            reason = self._failure.strerror or str(self._failure)
            raise UsageError(
                "P0526",
                f"rank {self._place.rank} cannot write a checkpoint in {self.folder}: {reason}",
                "give --save a folder with room, which all ranks can write to",
            ) from self._failure
        if self._failure is not None:
            raise self._failure

    def behind(self, done: int, slack: int) -> bool:
        """Whether more than `slack` of `done` steps are newer than the last complete checkpoint."""
        return self._begun is not None and done - self._begun > slack

    def complete(self, barrier: Callable[[], None]) -> None:
        """Wait until all ranks have completed the last checkpoint; `barrier` is a barrier of all ranks."""
        self.wait()
        barrier()  # the rank that wrote last completes the checkpoint before it gets here
        self._begun = None

    def _own_pieces(self, name: str, held: Held) -> tuple[Piece, ...]:
        place, shard = self._place, held.shard
        if not writes_tensor(name, shard.cut, place.sizes, place.coordinate, held.holders):
            return ()
        return pieces(shard.dims, held.shape, place.sizes, place.coordinate, shard.sectioned)

    def _pin(self, held: Mapping[str, Held], mine: Mapping[str, Sequence[Piece]]) -> None:
        """Allocate pinned memory for pieces on a GPU that are saved for the first time."""
        parts = {
            (name, index): held[name].tensor.detach()[piece.here.slices]
            for name, found in mine.items()
            for index, piece in enumerate(found)
            if held[name].tensor.is_cuda
        }
        new = {key: part for key, part in parts.items() if not _fits(self._buffers.get(key), part)}
        if new:
            self._buffers.update(zip(new, pinned(list(new.values())), strict=True))

    def _copied(self, name: str, index: int, piece: Piece, tensor: Tensor) -> Tensor:
        """The piece in host memory, which every save reuses."""
        part = tensor.detach()[piece.here.slices]
        buffer = self._buffers.get((name, index))
        if buffer is None or not _fits(buffer, part):
            buffer = torch.empty(part.shape, dtype=part.dtype)
            self._buffers[name, index] = buffer
        return buffer.copy_(part, non_blocking=True)

    def _write_files(
        self,
        step: int,
        copies: Mapping[str, list[tuple[Piece, Tensor]]],
        wholes: Mapping[str, tuple[str, tuple[int, ...]]],
        ready: torch.cuda.Event | None,
        position: str,
    ) -> None:
        try:
            if ready is not None:
                ready.synchronize()
            part = self.folder / f".{folder_name(step)}.{self._attempt}"
            part.mkdir(parents=True, exist_ok=True)
            self._write(part, copies, wholes, position)
            if self._store.add(f"saved/{step}", 1) == self._place.world_size:
                self._commit(step, part)
        except Exception as error:
            self._failure = error

    def _write(
        self,
        part: Path,
        copies: Mapping[str, list[tuple[Piece, Tensor]]],
        wholes: Mapping[str, tuple[str, tuple[int, ...]]],
        position: str,
    ) -> None:
        """Write this rank's files, and their contents to `rank_003.json`. The nth boxes of all tensors share a file."""
        files: dict[str, tuple[int, str]] = {}
        boxes = []
        for layer in range(max(map(len, copies.values()), default=0)):
            name = f"rank_{self._place.rank:03d}{f'_{layer}' * (layer > 0)}.safetensors"
            # Large element types first, so that each tensor is aligned to its element size.
            here = sorted(
                ((tensor, *found[layer]) for tensor, found in copies.items() if len(found) > layer),
                key=lambda item: -item[2].element_size(),
            )
            offsets = {tensor: {"saved_offsets": piece.whole.offsets} for tensor, piece, _ in here}
            metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
            with (part / name).open("wb") as file:
                sink = _Digesting(file)
                described = {tensor: (x.dtype, tuple(x.shape)) for tensor, _, x in here}
                write(sink, described, (x for _, _, x in here), metadata)
                file.flush()
                os.fsync(file.fileno())
            files[name] = sink.size, sink.digest.hexdigest()
            boxes += [[tensor, *wholes[tensor], name, piece.whole.offsets, x.shape] for tensor, piece, x in here]
        # Tensors without elements have no boxes, and are in no file.
        empty = [[tensor, *whole] for tensor, whole in wholes.items() if 0 in whole[1]]
        own_note = {"files": files, "boxes": boxes, "empty": empty, "position": position}
        (part / self._note(self._place.rank)).write_text(json.dumps(own_note))

    def _commit(self, step: int, part: Path) -> None:
        notes = [part / self._note(rank) for rank in range(self._place.world_size)]
        try:
            contents = [decoded(_Note, parsed(note.read_bytes())) for note in notes]
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error.filename} of another rank is not there; do all share the folder?"
            ) from None
        position = next((each.position for each in contents if each.position), "")
        run = self._run | ({"position": position} if position else {})
        manifest = Manifest(step=step, run=run, tensors=_tensors(contents), files={})
        for each in contents:
            manifest.files |= each.files
        for note in notes:
            note.unlink()
        with (part / NAME).open("w", encoding="utf-8") as file:
            file.write(manifest.text())
            file.flush()
            os.fsync(file.fileno())
        _sync(part)
        target = self.folder / folder_name(step)
        if target.exists():  # a damaged checkpoint that --resume has skipped
            target.rename(self.folder / f"{target.name}.damaged.{self._attempt}")
        part.rename(target)
        _sync(self.folder)
        self._prune()

    def _prune(self) -> None:
        """Delete all but the newest checkpoints, and the remains of interrupted saves."""
        kept = 0
        for path in checkpoints(self.folder):
            kept += _is_complete(path)
            if kept > self._keep and _is_complete(path):
                path.rename(self.folder / f".{path.name}.dropped")
        for path in self.folder.glob(".step_*"):
            if not path.name.endswith(f".{self._attempt}"):
                shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def _note(rank: int) -> str:
        return f"rank_{rank:03d}.json"


def _fits(buffer: Tensor | None, part: Tensor) -> bool:
    return buffer is not None and buffer.shape == part.shape and buffer.dtype == part.dtype


class _Digesting:
    """A file writer that counts and digests its bytes."""

    def __init__(self, file: Any) -> None:
        self.digest = hashlib.sha256()
        self.size = 0
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.size += len(data)


def _tensors(notes: list[_Note]) -> dict[str, Saved]:
    found: dict[str, Saved] = {}
    for each in notes:
        for name, dtype, shape in each.empty:
            found.setdefault(name, Saved(dtype, shape))
        for name, dtype, shape, file, offsets, sizes in each.boxes:
            found.setdefault(name, Saved(dtype, shape)).boxes.append((file, Box(offsets, sizes)))
    return dict(sorted(found.items()))


def _is_complete(path: Path) -> bool:
    try:
        read(path)
    except UsageError:
        return False
    return True


def _sync(folder: Path) -> None:
    """Sync the folder's own entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
