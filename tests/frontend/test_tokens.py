"""Token files: every row once per epoch, each rank's own rows only, and refusals of unusable files."""

from __future__ import annotations

import array
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import partc
from partc.frontend.captured_program import Batches
from partc.frontend.index_limits import index_limits
from partc.frontend.origin import Functions, trace
from partc.ir.index_limit import IndexLimit
from partc.ir.mesh import Mesh
from partc.package.verify import verify
from partc.runtime.checkpoint.manifest import checkpoints, read
from partc.runtime.errors import UsageError
from partc.runtime.layout import Shard
from partc.runtime.train.tokens import TokenFile, TokenRows, shuffled
from tests.durable import losses, train, trained, whole

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
CODES = {"uint8": "B", "uint16": "H", "uint32": "I", "int32": "i", "int64": "q"}


def written(path: Path, tokens: list[int], dtype: str = "uint16") -> Path:
    path.write_bytes(array.array(CODES[dtype], tokens).tobytes())
    return path


def plan(*names: str, rows: int = 4, length: int = 3, below: int | None = None) -> dict[str, Any]:
    entry = {
        "dtype": "i64",
        "layout": f"[{rows}@dp,mb, {length}]",
        **({"indices": [{"below": below}]} if below else {}),
    }
    return {"inputs": dict.fromkeys(names, entry)}


def rows_of(path: Path, labels: str = "next", *, again: bool = True, seed: int = 0, **form: Any) -> TokenRows:
    described = plan("ids", "labels", **form)
    batch = {"ids": torch.zeros(4, 3), "labels": torch.zeros(4, 3)}
    return TokenRows(TokenFile(path, None), described, batch, seed=seed, labels=labels, again=again)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000])
def test_a_shuffle_is_a_permutation_that_depends_on_its_key(count: int) -> None:
    orders = [[shuffled(index, count, key) for index in range(count)] for key in (1, 2)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert count < 10 or (orders[0] != orders[1] and orders[0] != sorted(orders[0]))


@pytest.mark.parametrize(("labels", "count"), [("next", 12), ("same", 13)])
def test_an_epoch_has_every_row_once_and_its_labels(tmp_path: Path, labels: str, count: int) -> None:
    tokens = list(range(100, 139))  # 13 rows of 3, or 12 with a token behind each
    found = rows_of(written(tmp_path / "t.bin", tokens), labels)
    assert found.count == count and f"{count} rows in an epoch" in str(found)
    for epoch in range(2):
        seen = []
        for index in range(epoch * count, (epoch + 1) * count):
            batch, row = found.batch(index // 4), index % 4
            ids, after = batch["ids"][row].tolist(), batch["labels"][row].tolist()
            assert after == ([token + 1 for token in ids] if labels == "next" else ids)
            seen.append(tuple(ids))
        assert sorted(seen) == [tuple(tokens[3 * row : 3 * row + 3]) for row in range(count)]
    first = [rows_of(tmp_path / "t.bin", seed=seed).batch(0)["ids"].tolist() for seed in (0, 0, 1)]
    assert first[0] == first[1] != first[2]


@pytest.mark.parametrize("cut", ["4@dp,mb", "4@mb", "2@mb · 2@dp", "4"])
@pytest.mark.parametrize("columns", ["6", "6@tp"])
def test_a_rank_reads_its_own_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str, columns: str
) -> None:
    written(tmp_path / "t.bin", list(range(200)))
    found = rows_of(tmp_path / "t.bin", length=6)
    read_rows: list[int] = []
    rows = TokenFile.rows

    def counting(file: TokenFile, starts: Any, *rest: Any) -> Any:
        read_rows.append(len(starts))
        return rows(file, starts, *rest)

    monkeypatch.setattr(TokenFile, "rows", counting)
    sizes, shard = {"dp": 2, "tp": 3}, Shard(f"i64[{cut}, {columns}]")
    for dp in range(2):
        for tp in range(3):
            coordinate = {"dp": dp, "tp": tp}
            mine = found.part(5, {"labels": shard}, sizes, coordinate)["labels"]
            assert read_rows.pop() == (2 if "dp" in cut else 4)
            assert torch.equal(mine, shard.local(found.batch(5)["labels"], sizes, coordinate))
            read_rows.clear()


@pytest.mark.parametrize("dtype", CODES)
def test_types_of_numbers(tmp_path: Path, dtype: str) -> None:
    numpy = pytest.importorskip("numpy")
    tokens = [3, 250, 7, 9, 1]
    written(tmp_path / "t.bin", tokens, dtype)
    numpy.save(tmp_path / "t.npy", numpy.array(tokens, dtype))
    for file in (TokenFile(tmp_path / "t.bin", dtype), TokenFile(tmp_path / "t.npy", None)):
        assert len(file) == 5 and file.rows([0, 1], 4, None).tolist() == [tokens[:4], tokens[1:]]


def damaged(folder: Path) -> dict[str, tuple[Path, str | None, str]]:
    numpy = pytest.importorskip("numpy")
    numpy.save(folder / "two.npy", numpy.zeros((3, 2), "uint16"))
    numpy.save(folder / "fields.npy", numpy.zeros(3, [("a", "<i4")]))
    numpy.save(folder / "float.npy", numpy.zeros(3))
    numpy.save(folder / "big.npy", numpy.zeros(3, ">u2"))
    numpy.save(folder / "good.npy", numpy.zeros(300, "uint16"))
    numpy.save(folder / "objects.npy", numpy.array([{}, []], object), allow_pickle=True)
    header = f"{{'descr': '{'x' * 60_000}', 'fortran_order': False, 'shape': (3,)}}".encode()
    (folder / "long.npy").write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header)
    whole = (folder / "good.npy").read_bytes()
    (folder / "cut.npy").write_bytes(whole[:-5])
    (folder / "header.npy").write_bytes(whole[:20])
    (folder / "code.npy").write_bytes(whole[:8] + struct.pack("<H", 20) + b"__import__('os')     " + whole[30:])
    (folder / "odd.bin").write_bytes(b"abc")
    (folder / "empty.bin").write_bytes(b"")
    written(folder / "good.bin", [1] * 10)
    return {
        "a table": (folder / "two.npy", None, "of shape (3, 2)"),
        "fields": (folder / "fields.npy", None, "no row of tokens"),
        "floats": (folder / "float.npy", None, "<f8"),
        "big endian": (folder / "big.npy", None, ">u2"),
        "a type of many letters": (folder / "long.npy", None, "..."),
        "objects": (folder / "objects.npy", None, "|O"),
        "cut off": (folder / "cut.npy", None, "is damaged"),
        "cut in its header": (folder / "header.npy", None, "not a NumPy file"),
        "code": (folder / "code.npy", None, "not a NumPy file"),
        "another type": (folder / "good.npy", "int32", "holds uint16, not int32"),
        "half a number": (folder / "odd.bin", None, "is damaged"),
        "nothing": (folder / "empty.bin", None, "cannot be mapped"),
        "no file": (folder / "no.bin", None, "No such file"),
        "a folder": (folder, None, "not a regular file"),
    }


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    for what, (path, dtype, message) in damaged(tmp_path).items():
        with pytest.raises(UsageError) as refused:
            TokenFile(path, dtype)
        assert refused.value.code == "P0545" and message in refused.value.cause, (what, refused.value.cause)
        assert len(refused.value.cause) < 500, what


def test_tokens_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "t.bin", [*range(12), 60, *range(12)])
    with pytest.raises(UsageError, match=r"has the token 60, and the model 50 of them"):
        for number in range(2):
            rows_of(path, below=50).batch(number)
    rows_of(path, below=61).batch(1)
    with pytest.raises(UsageError, match="has the token -1"):
        TokenFile(written(tmp_path / "s.bin", [1, -1], "int32"), "int32").rows([0], 2, None)
    with pytest.raises(UsageError, match=r"has 3 tokens, and a row of the batch 4"):
        rows_of(written(tmp_path / "short.bin", [1, 2, 3]))
    with pytest.raises(UsageError, match="P0544"):
        rows_of(path, again=False).batch(2)


def test_the_limits_of_entries_are_those_of_tables_and_classes() -> None:
    found = trace(GPT, None, Functions(), options={}, mesh=Mesh.parse("1"), batches=Batches(), precision="fp32")
    limits = {"ids": (IndexLimit(below=256),), "labels": (IndexLimit(below=256, ignored=-100),)}
    assert index_limits(found.program) == limits


@pytest.mark.slow
def test_a_model_trains_on_a_token_file_as_on_one_device(tmp_path: Path) -> None:
    options = {"depth": "2", "batch": "8", "seq": "16"}
    package = partc.compile(GPT, mesh="2x2x1", microbatches=2, precision="fp64", options=options).write(
        tmp_path / "build"
    )
    tokens = written(tmp_path / "t.bin", [(7 * i + i // 5) % 256 for i in range(400)])
    assert verify(package, virtual=True, steps=4, arguments=["--data", str(tokens)]).ok
    common = ("--accumulate", 2, "--save-every", 2)
    said = trained(
        package, "--steps", 5, *common, "--data", tokens, "--save", tmp_path / "once", "--metrics", tmp_path / "m"
    )
    assert "labels are the next tokens, 24 rows in an epoch" in said
    trained(package, "--steps", 2, *common, "--data", tokens, "--save", tmp_path / "twice")
    trained(package, "--steps", 5, *common, "--save", tmp_path / "twice", "--resume")  # the file is in the checkpoint
    assert read(checkpoints(tmp_path / "twice")[0]).run["data"] == str(tokens)
    ends = [whole(checkpoints(tmp_path / name)[0]) for name in ("once", "twice")]
    assert all(ends[0][name].equal(ends[1][name]) for name in ends[0])
    trained(package, "--steps", 5, "--accumulate", 2, "--metrics", tmp_path / "other")
    assert losses(tmp_path / "m") != losses(tmp_path / "other")
    stopped = train(package, "--data", written(tmp_path / "w.bin", [300] * 400))
    assert stopped.returncode == 2 and "has the token 300, and the model 256 of them" in stopped.stderr
    stopped = train(package, "--data", tmp_path / "none.bin")
    assert stopped.returncode == 2 and "P0545" in stopped.stderr


def test_a_batch_of_other_entries_is_named(tmp_path: Path) -> None:
    package = partc.compile(
        of_x, {"x": torch.zeros(4, 3), "labels": torch.zeros(4, 3, dtype=torch.long)}, mesh="1", loss=of_both
    ).write(tmp_path / "build")
    stopped = train(package, "--data", written(tmp_path / "t.bin", [1] * 99))
    assert stopped.returncode == 2 and "x: f32[4, 3], labels: i64[4, 3]" in stopped.stderr


def of_x() -> torch.nn.Module:
    return torch.nn.Linear(3, 3)


def of_both(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) * batch["labels"]).mean()


if sys.byteorder != "little":
    pytest.skip("array writes the machine's own order", allow_module_level=True)
