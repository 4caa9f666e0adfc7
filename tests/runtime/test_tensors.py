"""Tensor files against the safetensors library in both directions, and against damage."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from partc.runtime.checkpoint.safetensors import BadTensorFile, TensorFile, load, save

safetensors = pytest.importorskip("safetensors.torch")


def examples() -> dict[str, Tensor]:
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16]
    tensors = {f"t{i}": torch.randn(3, i + 1).mul(9).to(kind) for i, kind in enumerate(kinds)}
    return {
        **tensors,
        "flags": torch.tensor([True, False, True]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "strided": torch.arange(6.0).view(2, 3).t(),
        "a/b.c ü": torch.ones(1),
    }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left
    )


def test_round_trip(tmp_path: Path) -> None:
    save(tmp_path / "x", examples(), {"loss": "1.5"})
    tensors, metadata = load(tmp_path / "x")
    assert same(tensors, examples() | {name: tensors[name] for name in tensors if name.startswith("t")})
    assert metadata == {"loss": "1.5"}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_the_library_reads_ours(tmp_path: Path) -> None:
    tensors = examples()
    save(tmp_path / "x", tensors, {"a": "b"})
    assert same(safetensors.load_file(tmp_path / "x"), tensors)


def test_parts_wherever_a_tensor_begins(tmp_path: Path) -> None:
    tensors = {"odd": torch.ones(3, dtype=torch.bool), "x": torch.randn(4, 5, 6), "n": torch.tensor(7)}
    save(tmp_path / "x", tensors)
    file = TensorFile(tmp_path / "x")
    assert torch.equal(file.tensor("x", (slice(1, 3), slice(0, 5), slice(2, 3))), tensors["x"][1:3, :, 2:3])
    assert torch.equal(file.tensor("n"), tensors["n"]) and same(load(tmp_path / "x")[0], tensors)


def test_we_read_the_librarys(tmp_path: Path) -> None:
    tensors = {name: x.contiguous() for name, x in examples().items()}
    safetensors.save_file(tensors, tmp_path / "x", {"a": "b"})
    assert same(load(tmp_path / "x")[0], tensors)


def written(path: Path, header: object, data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ([], "not an object"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 12]}}, "does not fit"),
        ({"x": {"dtype": "F32", "shape": [3], "data_offsets": [8, 20]}}, "begins at byte 8"),
        ({"x": {"dtype": "F32", "shape": [-3], "data_offsets": [0, 0]}}, "less than 0"),
        ({"x": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}}, "described wrongly"),
        ({"x": {"dtype": "F32", "data_offsets": [0, 8]}}, "described wrongly"),
        ({"x": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, "described wrongly"),
    ],
)
def test_damage_is_noticed(tmp_path: Path, header: object, why: str) -> None:
    with pytest.raises(BadTensorFile, match=why):
        load(written(tmp_path / "x", header, bytes(16)))


def test_files_that_are_cut_off(tmp_path: Path) -> None:
    save(tmp_path / "x", {"a": torch.ones(100)})
    whole = (tmp_path / "x").read_bytes()
    for length in (0, 5, 20, len(whole) - 1):
        (tmp_path / "x").write_bytes(whole[:length])
        with pytest.raises(BadTensorFile):
            load(tmp_path / "x")
