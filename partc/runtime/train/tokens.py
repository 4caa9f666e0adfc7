"""Token files as data: one long row of token numbers on disk, mapped into memory.

A `.bin` file only has little-endian numbers, a `.npy` file one array. In an epoch each row, of the batch's row length,
is read once, in an order that follows from the seed and the epoch; a rank only reads its own rows.
"""

from __future__ import annotations

import ast
import mmap
import re
import reprlib
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..documents import regular
from ..errors import UsageError
from ..layout import Shard, local_part, short_name
from .entries import rebuilt_batch

DTYPES = {name: getattr(torch, name) for name in ("uint8", "uint16", "uint32", "int32", "int64")}
_NPY = {"|u1": "uint8", "<u2": "uint16", "<u4": "uint32", "<i4": "int32", "<i8": "int64"}
_LABELS = frozenset({"labels", "label", "targets", "target", "y"})
_ROUNDS = 4
_STRETCH, _STRETCHES = 1 << 18, 64  # tokens per stretch, and stretches, that are checked before a run


class TokenFile:
    """The tokens of a file. Raises UsageError P0545."""

    def __init__(self, path: Path, dtype: str | None) -> None:
        self.path = path
        try:
            with regular(path) as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise self._unusable(f"cannot be mapped: {why}", "name a file of tokens that every rank can read") from None
        start, count = 0, None
        if path.suffix == ".npy":
            found, start, count = self._header()
            if dtype not in (None, found):
                raise self._unusable(f"holds {found}, not {dtype}", "leave out --data-dtype: the file says its own")
            dtype = found
        kind = DTYPES[dtype or "uint16"]
        size = len(self._memory) - start
        if size % kind.itemsize or (count is not None and size != count * kind.itemsize):
            held = f"{size:,} bytes of tokens"
            wanted = f"{count:,} of {kind.itemsize} bytes" if count is not None else f"tokens of {kind.itemsize} bytes"
            raise self._unusable(f"is damaged: {held} are not {wanted}", "write it again, or correct --data-dtype")
        self._tokens = torch.frombuffer(self._memory, dtype=kind, offset=start) if size else torch.empty(0)

    def __len__(self) -> int:
        return len(self._tokens)

    def rows(self, starts: Iterable[int], length: int, below: int | None) -> Tensor:
        """Rows of tokens from these positions. Raises UsageError P0545 for a token of `below` or more."""
        found = torch.stack([self._tokens[start : start + length].to(torch.int64) for start in starts])
        least, most = (int(x) for x in found.aminmax())
        if least < 0 or (below is not None and most >= below):
            wrong = least if least < 0 else most
            cause = f"has the token {wrong:,}, and the model {f'{below:,} of them' if below else 'no negative ones'}"
            raise self._unusable(cause, "was it made for another vocabulary, or of another --data-dtype?")
        return found

    def need(self, needed: int) -> None:
        """Raise UsageError P0545 if the file has fewer tokens."""
        if len(self) < needed:
            cause = f"has {len(self):,} tokens, and a row of the batch {needed:,}"
            raise self._unusable(cause, "give a longer file, or compile for shorter rows")

    def sample(self, below: int | None) -> None:
        """Check stretches across the file: all tokens if there are at most 16 million. Raises UsageError P0545."""
        step = _STRETCH * -(-len(self) // (_STRETCH * _STRETCHES))
        for start in range(0, len(self), step):
            self.rows([start], _STRETCH, below)

    def _header(self) -> tuple[str, int, int]:
        """The type, the offset of the data and the number of elements of a NumPy file."""
        try:
            if self._memory[:6] != b"\x93NUMPY":
                raise ValueError("it does not start as one")
            wide = self._memory[6] > 1
            length = struct.unpack("<I" if wide else "<H", self._memory[8 : 12 if wide else 10])[0]
            start = (12 if wide else 10) + length
            header = ast.literal_eval(self._memory[start - length : start].decode("latin1").strip())
            shape, kind = header["shape"], str(header["descr"])
        except (LookupError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError, struct.error) as error:
            raise self._unusable(f"is not a NumPy file: {error}", "save it with numpy.save") from None
        if kind not in _NPY or not (isinstance(shape, tuple) and len(shape) == 1 and isinstance(shape[0], int)):
            help = f"save one row of {', '.join(DTYPES)}"
            held = f"{reprlib.repr(kind)} of shape {reprlib.repr(shape)}"
            raise self._unusable(f"holds {held}, no row of tokens", help)
        return _NPY[kind], start, shape[0]

    def _unusable(self, why: str, help: str) -> UsageError:
        return UsageError("P0545", f"{self.path} {why}", help)


class TokenRows:
    """Batches of token rows: the first entry of the batch has tokens, the second one labels.

    `labels` is `next` (the tokens that follow) or `same`. Without `shuffles`, rows come in the file's order. `form` is
    a batch with the constants. Raises UsageError P0544 and P0545.
    """

    def __init__(
        self,
        file: TokenFile,
        plan: Mapping[str, Any],
        form: Any,
        *,
        seed: int,
        labels: str,
        again: bool,
        shuffles: bool = True,
    ) -> None:
        self._file, self._form, self._seed, self._again, self._shuffles = file, form, seed, again, shuffles
        self._shards = _shards(plan)
        self._below = {name: _bound(entry) for name, entry in plan["inputs"].items()}
        self.names = ordered(plan)
        self.rows, self.length = self._shards[self.names[0]].shape
        self._behind = labels == "next" and len(self.names) == 2
        self.count = (len(file) - self._behind) // self.length  # rows per epoch
        file.need(self.length + self._behind)

    def __str__(self) -> str:
        labels = f"{self.names[-1]} are {'the next tokens' if self._behind else 'the same tokens'}, "
        return f"{self._file.path}: {labels if len(self.names) == 2 else ''}{self.count:,} rows in an epoch"

    def batch(self, number: int) -> Any:
        return rebuilt_batch(self._form, {name: self._read(number, name, range(self.rows)) for name in self.names})

    def part(
        self, number: int, inputs: Mapping[str, Shard], sizes: Mapping[str, int], coordinate: Mapping[str, int]
    ) -> dict[str, Tensor]:
        found = {}
        for name, shard in inputs.items():
            rows, columns = shard.dims
            mine = local_part(torch.arange(self.rows), (rows,), sizes, coordinate).tolist()
            whole = self._read(number, name, mine)
            found[name] = local_part(whole, (((len(mine), ()),), columns), sizes, coordinate).contiguous()
        return found

    def position(self, number: int) -> str:
        return ""

    def _read(self, number: int, name: str, rows: Iterable[int]) -> Tensor:
        shift = int(self._behind and name == self.names[1])
        starts = [self._row(number * self.rows + row) * self.length + shift for row in rows]
        return self._file.rows(starts, self.length, self._below[name]).to(self._shards[name].dtype)

    def _row(self, index: int) -> int:
        """The index in the file of the row that is read at `index`."""
        epoch, index = divmod(index, self.count)
        if epoch and not self._again:
            help = "--data-end repeat reads it again in another order"
            raise UsageError("P0544", f"{self._file.path} ends after {self.count:,} rows", help, alike=True)
        if not self._shuffles:
            return index
        return shuffled(index, self.count, _mixed(_mixed(self._seed) + epoch))


def _shards(plan: Mapping[str, Any]) -> dict[str, Shard]:
    return {name: Shard(entry["dtype"] + entry["layout"]) for name, entry in plan["inputs"].items()}


def ordered(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the entries to fill: tokens, and labels if there are any. Raises UsageError P0545."""
    shards = _shards(plan)
    shapes = {shard.shape for shard in shards.values()}
    fits = len(shards) in (1, 2) and len(shapes) == 1 and all(len(shape) == 2 for shape in shapes)
    if not fits or any(shard.type[0] != "i" for shard in shards.values()):
        held = ", ".join(f"{name}: {short_name(shard.dtype)}{list(shard.shape)}" for name, shard in shards.items())
        cause = f"a token file fills one or two entries of integers, (rows, length), and the batch has {held}"
        raise UsageError("P0545", cause, "make the other entries in the model, or write data(step)", alike=True)
    return tuple(sorted(shards, key=lambda name: re.split(r"\W", name.lower())[-1] in _LABELS))


def check_file(path: Path, dtype: str | None, plan: Mapping[str, Any], labels: str | None) -> None:
    """Check before a run that a file has enough tokens for a row, and only tokens of the model. Raises UsageError
    P0545.
    """
    names = ordered(plan)
    bounds = [bound for entry in plan["inputs"].values() if (bound := _bound(entry)) is not None]
    file = TokenFile(path, dtype)
    file.need(_shards(plan)[names[0]].shape[1] + (labels == "next" and len(names) == 2))
    file.sample(min(bounds, default=None))


def _bound(entry: Mapping[str, Any]) -> int | None:
    """The number of tokens that the model has for an entry; None if it selects no rows and no classes."""
    return min((limit["below"] for limit in entry.get("indices", ())), default=None)


def shuffled(index: int, count: int, key: int) -> int:
    """The image of `index` under a permutation of `count` numbers: a Feistel network on the numbers below a power
    of 4.
    """
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mixed(key + (right << 3) + turn) & mask)
        index = left << half | right
        if index < count:
            return index


def _mixed(x: int) -> int:
    """A hash of 64 bits (splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) % (1 << 64)
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
    return x ^ x >> 31
