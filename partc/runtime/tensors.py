"""Named tensors in a file, in the safetensors format: a JSON header behind its length, then raw bytes."""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class BadTensorFile(ValueError):
    """The file isn't what the format says."""


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors; the file appears only when it is complete."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, x in tensors.items():
        size = x.numel() * x.element_size()
        header[name] = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            flat = x.detach().cpu().contiguous().view(-1)
            if flat.numel():
                file.write(_raw(flat))
    unfinished.replace(path)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and metadata. Raises BadTensorFile."""
    data = bytearray(path.read_bytes())
    if len(data) < 8:
        raise BadTensorFile(f"{path} has {len(data)} bytes: no header")
    (length,) = struct.unpack_from("<Q", data)
    if length > len(data) - 8:
        raise BadTensorFile(f"{path}: its header's length says {length}, the file has {len(data)} bytes")
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError as error:
        raise BadTensorFile(f"{path}: its header isn't JSON: {error}") from None
    if not isinstance(header, dict):
        raise BadTensorFile(f"{path}: its header isn't an object")
    metadata = header.pop("__metadata__", {})
    tensors = {name: _read(path, name, entry, data, 8 + length) for name, entry in header.items()}
    return tensors, metadata


def _read(path: Path, name: str, entry: dict[str, object], data: bytearray, start: int) -> Tensor:
    try:
        dtype, shape = _DTYPES[str(entry["dtype"])], [int(size) for size in entry["shape"]]  # type: ignore[attr-defined]
        begin, end = (int(offset) for offset in entry["data_offsets"])  # type: ignore[attr-defined]
    except (KeyError, TypeError, ValueError) as error:
        raise BadTensorFile(f"{path}: {name} is described wrongly: {error!r}") from None
    count = math.prod(shape)
    if min(shape, default=0) < 0 or not 0 <= begin <= end <= len(data) - start or end - begin != count * dtype.itemsize:
        raise BadTensorFile(f"{path}: {name} {entry['dtype']}{shape} does not fit its bytes {begin} to {end}")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data[start + begin : start + end], dtype=dtype).view(shape)


def _raw(flat: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied; needs no NumPy."""
    size = flat.numel() * flat.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(flat.data_ptr()))
