"""Indexes of --init, plans, traces and tuned.json, field by field: each is refused with a code, or read as it says."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from partc.cli import main
from partc.errors import PartcError
from partc.frontend import origin
from partc.package import output
from partc.package.recorded_steps import read_trace
from partc.reports import chrome_trace
from partc.runtime.checkpoint.given_parameters import INDEX, fitting
from partc.runtime.checkpoint.safetensors import save
from partc.runtime.clock import Interval
from partc.runtime.errors import UsageError
from partc.runtime.train.job import parse
from partc.runtime.train.tuning import given
from tests.durable import build
from tests.models import tied
from tests.test_manifest_fuzz import mutants, watched


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("outside"), "2x2x1")


@pytest.mark.slow
def test_every_field_of_a_plan(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (package / "plan.json").read_text()
    refused = shown = 0
    try:
        for number, (what, plan) in enumerate(list(mutants(json.loads(text), Path("/secret.bin")))[::3]):
            (package / "plan.json").write_text(json.dumps(plan))
            code = 0
            try:
                parse(["--steps", "1"], package)
            except UsageError as error:
                code = 2
                assert error.code == "P0503", what
            refused += code == 2
            if code == 0 or number % 6 == 0:
                shows = main(["memory", str(package)])
                said = capsys.readouterr()
                assert shows in (code, 2) and ("error P0" in said.err) == (shows == 2), (what, said.err)
                shown += shows == 0
    finally:
        (package / "plan.json").write_text(text)
    assert refused > 300 and shown > 0


def test_every_field_of_an_index(package: Path, tmp_path: Path) -> None:
    plan = json.loads((package / "plan.json").read_text())
    state = {name: x.double() for name, x in tied.model().state_dict().items()}
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    folder = tmp_path / "model"
    folder.mkdir()
    names = sorted(state)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for shard, held in shards.items():
        save(folder / shard, {name: state[name] for name in held})
        save(tmp_path / shard, {name: state[name] for name in held})  # one way up
    save(tmp_path / "secret.bin", {name: state[name] for name in names[:5]})
    index = {"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}}
    others = [found for _, found in mutants(index, tmp_path / "secret.bin")]
    for name in ("../a.safetensors", str(tmp_path / "a.safetensors"), "missing.safetensors", "./a.safetensors", "b"):
        others.append({"weight_map": {n: name if s[0] == "a" else s for n, s in index["weight_map"].items()}})
    others.append({"weight_map": {**index["weight_map"], names[0]: "b.safetensors"}})
    others.append({"weight_map": {n: s for n, s in index["weight_map"].items() if n != names[0]}})
    cases = 0
    for found in others:
        (folder / INDEX).write_text(json.dumps(found))
        with watched(folder):
            try:
                read = fitting(folder, plan, lambda: shapes)
                assert torch.equal(read.whole("scale"), state["scale"]) and found["weight_map"] == index["weight_map"]
            except UsageError as error:
                assert error.code == "P0527"
                cases += 1
    assert cases > 80
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "a.safetensors").unlink()
    (folder / "a.safetensors").symlink_to(tmp_path / "secret.bin")
    with watched(folder), pytest.raises(UsageError, match="a link that leaves the folder"):
        fitting(folder, plan, lambda: shapes)
    cache = tmp_path / "models--x" / "snapshots" / "1"  # as Hugging Face keeps what it has downloaded
    (cache.parent.parent / "blobs").mkdir(parents=True)
    cache.mkdir(parents=True)
    for number, shard in enumerate(shards):
        (tmp_path / shard).rename(cache.parent.parent / "blobs" / str(number))
        (cache / shard).symlink_to(Path("..") / ".." / "blobs" / str(number))
    (cache / INDEX).write_text(json.dumps(index))
    assert torch.equal(fitting(cache, plan, lambda: shapes).whole("scale"), state["scale"])


def test_every_field_of_a_trace(tmp_path: Path) -> None:
    def rank(number: int) -> dict[str, Any]:
        link = "send" if number == 0 else "recv"
        intervals = [[10, 90, "work", "0F0", "", 0, "", 10], [20, 30, link, link, "link 0 1", 8, "0F0", 15]]
        intervals.append([40, 50, "collective", "all_reduce", "dp,tp", 8, "0F0", 35])
        return {
            "partc_trace": 1, "package": "/nowhere", "plan": "0" * 64, "rank": number, "world_size": 2,
            "peers": {"link 0 1": 1 - number}, "machine": 5, "epoch": 3, "fields": list(Interval._fields),
            "steps": [{"step": step, "intervals": intervals} for step in (2, 3)],
        }  # fmt: skip

    folder = tmp_path / "trace"
    folder.mkdir()
    (folder / "rank_000.json").write_text(json.dumps(rank(0)))
    refused = shown = 0
    for what, found in mutants(rank(1), tmp_path / "secret.bin"):
        (folder / "rank_001.json").write_text(json.dumps(found))
        with watched(folder):
            try:
                chrome_trace.document(None, read_trace(folder), None)
                shown += 1
            except PartcError as error:
                assert error.code == "P0607", what
                refused += 1
    assert refused > 150 and shown > 0


def test_a_trace_names_no_code_to_run(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The package that a trace names has a model file, which the user has not asked for."""
    (package / "model.py").rename(package / "model.py.kept")
    (package / "model.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    work = [[10, 90, "work", "0F0", "", 0, "", 10]]
    plan = hashlib.sha256((package / "plan.json").read_bytes()).hexdigest()
    for number in range(4):
        head = {"partc_trace": 1, "package": str(package), "plan": plan, "rank": number, "world_size": 4, "peers": {}}
        head |= {"machine": 5, "epoch": 3, "fields": list(Interval._fields), "steps": [{"step": 2, "intervals": work}]}
        (tmp_path / f"rank_{number:03d}.json").write_text(json.dumps(head))
    try:
        assert main(["trace", str(tmp_path)]) == 0 and "--package" in capsys.readouterr().out
        assert not (tmp_path / "ran").exists()
    finally:
        (package / "model.py.kept").rename(package / "model.py")


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b'{"a": 3}', b'{"a": {"b": 3}}', b'{"a": {"b": {"c": 1.5}}}',
     b'{"a": {"b": {"c": true}}}', b'{"a": {}, "a": {}}', b'{"a": {"b": {"c": ' + b"9" * 9999 + b"}}}"],
)  # fmt: skip
def test_files_of_kernels_configurations(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tuned.json").write_bytes(data)
    for path in (tmp_path / "tuned.json", tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match="P0532"):
            given(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no regular file"):
        given(tmp_path / "pipe")


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "link/inside", "a/../../outside"])
def test_the_list_of_a_packages_files(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """files.sha256 is read before a package is written over: what it lists lies in the folder, or nothing is done."""
    folder = tmp_path / "build"
    folder.mkdir()
    (folder / "plan.json").write_text('{"partc": 1}')
    (folder / "link").symlink_to(tmp_path)
    (folder / "files.sha256").write_text(f"{'0' * 64}  {name}\n")
    (tmp_path / "outside").write_text("x")
    with watched(folder), pytest.raises(PartcError, match="P0606"):
        output.check_target(folder)


def test_a_changed_pickle_is_not_loaded(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    source, extra = origin._stored(model, {"input": torch.ones(2, 4)}, origin.Functions())
    for name, data in {"model.py": source.encode(), **extra}.items():
        (tmp_path / name).write_bytes(data)
    found: dict[str, Any] = {"__file__": str(tmp_path / "model.py")}
    exec(compile(source, "model.py", "exec"), found)
    assert torch.equal(found["model"]()[0].weight, model[0].weight) and found["batch"]()["input"].shape == (2, 4)
    torch.save(torch.nn.Linear(1, 1), tmp_path / "model.pt")
    with pytest.raises(RuntimeError, match="is not the file that was compiled"):
        found["model"]()
