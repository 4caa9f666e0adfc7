"""Indexes of --init, plans, clusters, traces and tuned.json, field by field: each value is refused with
a code, or read correctly.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from partc.cli import main
from partc.cluster.cluster import preset
from partc.cluster.files import cluster_of
from partc.compilation.plan import ParallelPlan
from partc.compilation.simulation import Simulator, prediction, predictions, read_plans
from partc.cost.calibration import calibration
from partc.cost.rates import ClusterRates
from partc.errors import PartcError
from partc.explain import CATALOGUE
from partc.frontend import origin
from partc.package import output
from partc.package.recorded_steps import read_trace
from partc.planner.replanning import request_of
from partc.reports import chrome_trace
from partc.runtime.checkpoint.given_parameters import INDEX, under_plan_names
from partc.runtime.checkpoint.safetensors import save
from partc.runtime.clock import Interval
from partc.runtime.errors import UsageError
from partc.runtime.train.command_line import parse
from partc.runtime.train.tuning import read_table
from tests.durable import build
from tests.models import tied
from tests.runtime.test_manifest_fuzz import mutants, watched


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
            try:
                request_of(package, "4xCPU", None)
                assert code == 0, what
            except PartcError as error:
                assert error.code in CATALOGUE, what
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
                read = under_plan_names(folder, plan, lambda: shapes)
                assert torch.equal(read.whole("scale"), state["scale"]) and found["weight_map"] == index["weight_map"]
            except UsageError as error:
                assert error.code == "P0527"
                cases += 1
    assert cases > 80
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "a.safetensors").unlink()
    (folder / "a.safetensors").symlink_to(tmp_path / "secret.bin")
    with watched(folder), pytest.raises(UsageError, match="a link that leaves the folder"):
        under_plan_names(folder, plan, lambda: shapes)
    cache = tmp_path / "models--x" / "snapshots" / "1"  # as Hugging Face keeps what it has downloaded
    (cache.parent.parent / "blobs").mkdir(parents=True)
    cache.mkdir(parents=True)
    for number, shard in enumerate(shards):
        (tmp_path / shard).rename(cache.parent.parent / "blobs" / str(number))
        (cache / shard).symlink_to(Path("..") / ".." / "blobs" / str(number))
    (cache / INDEX).write_text(json.dumps(index))
    assert torch.equal(under_plan_names(cache, plan, lambda: shapes).whole("scale"), state["scale"])


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
            read_table(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        read_table(tmp_path / "pipe")


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
    source, extra = origin.saved_model_source(model, {"input": torch.ones(2, 4)}, origin.Functions())
    for name, data in {"model.py": source.encode(), **extra}.items():
        (tmp_path / name).write_bytes(data)
    found: dict[str, Any] = {"__file__": str(tmp_path / "model.py")}
    exec(compile(source, "model.py", "exec"), found)
    assert torch.equal(found["model"]()[0].weight, model[0].weight) and found["batch"]()["input"].shape == (2, 4)
    torch.save(torch.nn.Linear(1, 1), tmp_path / "model.pt")
    with pytest.raises(RuntimeError, match="is not the file that was compiled"):
        found["model"]()


MLP = str(Path(__file__).parents[2] / "examples" / "mlp.py")


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    cluster = preset("4x2xH100-80GB")
    return Simulator(MLP, cluster, calibration(cluster))


CLUSTER: dict[str, Any] = {
    "name": "lab", "nodes": 4, "devices": 2, "domain": 4,
    "device": {"name": "X-8GB", "memory": 8 << 30, "peak": {"f32": 1e13, "bf16": 1e14}, "bandwidth": 1e12, "cores": 100,
               "launch": 3e-6, "host": 8e-6, "kind": "gpu"},
    "inside": {"kind": "nvlink", "gigabytes": 300.0, "latency": 1e-6, "switched": True, "reduces": False},
    "between": {"kind": "infiniband", "gigabytes": 25.0, "latency": 1e-6, "switched": True, "reduces": False},
    "network": {"kind": "fat-tree", "leaf": 2, "oversubscription": 2.0, "dims": []},
}  # fmt: skip
EXTREME = (0, 1, -1, 3, 1 << 62, 5e-324, 1e-300, 1e300, math.inf, math.nan)


def toml(value: Any) -> str:
    """A value in TOML's notation; None has none, and leaves a damaged file."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {toml(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return str(value) if isinstance(value, float) else "none" if value is None else json.dumps(value)


def extremes(found: dict[str, Any]) -> Any:
    """The document with each number at its extremes."""
    for name, value in found.items():
        if isinstance(value, dict):
            for other in extremes(value):
                yield {**found, name: other}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            for number in EXTREME:
                yield {**found, name: number}


def test_every_field_of_a_cluster(simulator: Simulator, tmp_path: Path) -> None:
    """A cluster is refused, or predictions on it are finite numbers."""
    plan = ParallelPlan(mesh="pp=2,dp=2,tp=2", microbatches=2, zero=1, options={"batch": 16})
    program = simulator.program(plan)
    file = tmp_path / "cluster.toml"
    refused = read = 0
    shapes = [{**CLUSTER, "network": {"kind": kind}} for kind in ("ring", "hypercube", "dragonfly", "full")]
    for found in [*(found for _, found in mutants(CLUSTER, tmp_path / "x")), *extremes(CLUSTER), *shapes]:
        text = "\n".join(f"{json.dumps(key)} = {toml(value)}" for key, value in found.items())
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            cluster = cluster_of(str(file))
        except PartcError as error:
            assert error.code in ("P0801", "P0802"), text
            refused += 1
            continue
        read += 1
        if cluster.size >= 8:
            done = prediction(program, ClusterRates(cluster, calibration(cluster)))
            assert 0 < done.step_seconds < math.inf and done.compute >= 0 and done.exposed >= 0, text
    assert refused > 400 and read > 40


PLAN = {
    "mesh": "pp=2,dp=2,tp=2", "microbatches": 2, "schedule": "interleaved", "virtual_stages": 2, "zero": "1@dp",
    "recompute": "full", "precision": "bf16", "kernels": "auto", "loss_chunks": 1, "bucket": "25MB", "nodes": 4,
    "grad_reduce": "fp32", "compress_grads": "none", "cuda_graphs": False, "optimizer": "sgd:momentum=0.9", "options": {"batch": 16},
}  # fmt: skip
LINES = (
    '{"mesh":', "[]", '"x"', "[" * 100_000, '{"mesh": "dp=8", "microbatches": NaN}', '{"mesh": "dp=8", "zero": 1e400}',
    '{"mesh": "dp=99999999999999999999"}', '{"mesh": "dp=1048576"}', '{"mesh": ""}', '{"mesh": "\\u001b[31mdp=8"}',
    '{"mesh": "pp=8", "schedule": "interleaved", "virtual_stages": 9223372036854775807}',
    '{"mesh": "dp=8", "microbatches": 9223372036854775807}', '{"mesh": "pp=2,dp=4", "schedule": "/etc/passwd.csv"}',
    '{"mesh": "dp=8", "bucket": "99999999999999999999999999PB"}', '{"mesh": "dp=8", "nodes": 3}',
    '{"mesh": "dp=8", "optimizer": "sgd:momentum=nan"}', '{"mesh": "dp=8", "optimizer": "__import__(\'os\')"}',
    '{"mesh": "dp=8", "experts": "ep=x@y"}', '{"mesh": "dp=8", "options": {"batch": -1}}',
)  # fmt: skip


def test_every_field_of_a_parallel_plan(simulator: Simulator, tmp_path: Path) -> None:
    """Each line of a file of plans is refused with a code, and none is a bug; those that are read are predicted."""
    lines = [json.dumps(plan) for _, plan in mutants(PLAN, tmp_path / "x")]
    file = tmp_path / "plans.jsonl"
    file.write_text("\n".join([*lines, *LINES]))
    found = list(predictions(simulator, list(read_plans(file))))
    assert len(found) == len(lines) + len(LINES)
    codes = [None if each["error"] is None else each["error"]["code"] for each in found]
    assert "P0806" not in codes and codes.count(None) > 10 and codes.count("P0804") > 110
    assert None not in codes[len(lines) :]
    (tmp_path / "plan.json").write_text(LINES[0])
    assert main(["compile", MLP, "--plan", str(tmp_path / "plan.json"), "-o", str(tmp_path / "build")]) == 2
