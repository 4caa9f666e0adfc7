"""Named tensors in a file, in the safetensors format: the length of a JSON header, the header, then raw bytes."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from ..documents import Malformed, Natural, decoded, parsed, regular
from ..whole_files import replacing

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_PAIRS = {"C64": "F32"}  # complex numbers, read as pairs in a new last dimension

# The constant has a name in Python 3.13; the number is Linux's.
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

# The beginning of a zip archive, or of a pickle that starts with a long number.
_OF_TORCH_SAVE = (b"PK\x03\x04", b"\x80\x02\x8a\n")
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_MOST_DIMS = 64

Described = tuple[torch.dtype, tuple[int, ...]]  # element type and shape


class BadTensorFile(ValueError):
    """The file violates the format."""


class Sink(Protocol):
    """A writer of bytes."""

    def write(self, data: bytes | memoryview, /) -> object: ...


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors; the file appears only when it is complete."""
    with replacing(path) as file:
        write(file, {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}, tensors.values(), metadata)


def write(
    file: Sink,
    described: Mapping[str, Described],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file's bytes; `tensors` come one by one, in the order of their descriptions."""
    file.write(tensor_offsets(described, metadata)[1])
    for (dtype, shape), x in zip(described.values(), tensors, strict=True):
        if x.dtype != dtype or tuple(x.shape) != shape:
            raise ValueError(f"{x.dtype}{list(x.shape)} where {dtype}{list(shape)} was announced")
        flat = x.detach().cpu().contiguous().view(-1)
        if flat.numel():
            file.write(raw(flat))


def tensor_offsets(
    described: Mapping[str, Described], metadata: Mapping[str, str] | None = None
) -> tuple[dict[str, int], bytes]:
    """The first byte of each tensor and of the file's end (""), and the bytes before the first tensor."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    starts: dict[str, int] = {}
    offset = 0
    for name, (dtype, shape) in described.items():
        size = math.prod(shape) * dtype.itemsize
        kind = "C64" if dtype == torch.complex64 else _NAMES[dtype]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + size]}
        starts[name] = offset
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    before = struct.pack("<Q", len(text)) + text
    return {name: start + len(before) for name, start in {**starts, "": offset}.items()}, before


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and metadata. Raises BadTensorFile."""
    file = TensorFile(path)
    return {name: file.tensor(name).clone() for name in file.described}, file.metadata


def _known(dtype: str) -> str:
    return "" if dtype in {*_DTYPES, *_PAIRS} else f"none of {', '.join((*_DTYPES, *_PAIRS))}"


def check_allocatable(value: tuple[int, ...]) -> str:
    """Check that torch can allocate this shape: it multiplies sizes in 64 bits, before it checks which are 0."""
    fits = len(value) <= _MOST_DIMS and math.prod(max(1, size) for size in value) < 1 << 60
    return "" if fits else "too large for a tensor"


Shape = Annotated[tuple[Natural, ...], check_allocatable]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor in a file's header."""

    dtype: Annotated[str, _known]
    shape: Shape
    data_offsets: tuple[Natural, Natural]  # relative to the header's end


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # relative to the start of the file


class TensorFile:
    """A file that is read on demand. Raises BadTensorFile, and OSError if it does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            file = regular(path)
        except Malformed as error:
            raise BadTensorFile(f"{path} {error}") from None
        with file:
            size = os.fstat(file.fileno()).st_size
            header, start = _header(path, file.read, size)
            # Private pages: writes don't reach the file, so torch may treat them as its own memory. No reserved space:
            # a file may be larger than memory.
            self._data = mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        try:
            self.metadata = decoded(dict[str, str], header.pop("__metadata__", {}))
        except Malformed as error:
            raise BadTensorFile(f"{path}: __metadata__: {error}") from None
        self._places = _places(path, header, start, size)

    @property
    def described(self) -> dict[str, Described]:
        return {name: (place.dtype, place.shape) for name, place in self._places.items()}

    def tensor(self, name: str, slices: tuple[slice, ...] = ()) -> Tensor:
        """A tensor, or a part of it: a view of the mapped file, whose pages are read when accessed."""
        place = self._places[name]
        count, width = math.prod(place.shape), place.dtype.itemsize
        if count == 0:
            return torch.empty(place.shape, dtype=place.dtype)[slices]
        raw = torch.frombuffer(self._data, dtype=torch.uint8, count=count * width, offset=place.begin)
        if place.begin % width == 0:
            return raw.view(place.dtype).view(place.shape)[slices]
        return raw.view(*place.shape, width)[slices].clone().view(place.dtype).squeeze(-1)


def _header(path: Path, read: Callable[[int], bytes], size: int) -> tuple[dict[str, object], int]:
    """The file's header, and the offset of its data."""
    if size < 8:
        raise BadTensorFile(f"{path} has {size} bytes: no header")
    first = read(8)
    (length,) = struct.unpack("<Q", first)
    if length > size - 8 and first.startswith(_OF_TORCH_SAVE):
        raise BadTensorFile(
            f"{path} was written by torch.save: safetensors.torch.save_model(model, FILE) writes it anew"
        )
    if length > size - 8:
        raise BadTensorFile(f"{path}: its header's length says {length}, the file has {size} bytes")
    if length > _LONGEST_HEADER:
        raise BadTensorFile(f"{path}: its header has {length:,} bytes, more than {_LONGEST_HEADER:,}")
    try:
        return decoded(dict[str, Any], parsed(read(length))), 8 + length
    except Malformed as error:
        raise BadTensorFile(f"{path}: its header: {error}") from None


def _places(path: Path, header: Mapping[str, object], start: int, size: int) -> dict[str, _TensorEntry]:
    """The position of each tensor. The format allows no gaps: tensors fill the bytes after the header exactly."""
    entries = {name: _entry(path, name, found) for name, found in header.items()}
    at, behind = 0, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != at:
            raise BadTensorFile(f"{path}: {name!r} begins at byte {begin}, {behind} ends at {at}")
        at, behind = end, repr(name)
    if at != size - start:
        raise BadTensorFile(f"{path}: its tensors have {at:,} bytes, the file has {size - start:,} for them")
    return {
        name: _TensorEntry(_DTYPES[entry.dtype], entry.shape, start + entry.data_offsets[0])
        for name, entry in entries.items()
    }


def _entry(path: Path, name: str, found: object) -> _Entry:
    try:
        entry = decoded(_Entry, found)
    except Malformed as error:
        raise BadTensorFile(f"{path}: {name!r} is described wrongly: {error}") from None
    if entry.dtype in _PAIRS:
        entry = replace(entry, dtype=_PAIRS[entry.dtype], shape=(*entry.shape, 2))
    begin, end = entry.data_offsets
    if end - begin != math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize:
        raise BadTensorFile(
            f"{path}: {name!r} {entry.dtype}{list(entry.shape)} does not fit its bytes {begin} to {end}"
        )
    return entry


def raw(flat: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; needs no NumPy."""
    size = flat.numel() * flat.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(flat.data_ptr()))
