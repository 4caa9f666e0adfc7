"""Training continues from a checkpoint as if it had not stopped, on the same mesh or another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import partc
from partc.runtime.checkpoint.manifest import checkpoints, read
from partc.runtime.checkpoint.safetensors import load
from partc.runtime.processes import ownership
from tests.durable import TIED, build, losses, same_records, trained, whole

MESHES = ("2x2x2", "tp=4", "2x2x2 zero 3", "tp=2,pp=2", "dp=4 zero 1")
STEPS, HALF = 6, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages, and one run that never stopped, on the first mesh."""
    path = tmp_path_factory.mktemp("durable")
    package = build(path, MESHES[0])
    arguments = (
        "--steps",
        STEPS,
        "--save",
        path / "full",
        "--save-every",
        HALF,
        "--keep",
        9,
        "--metrics",
        path / "log",
    )
    trained(package, *arguments, "--record", path / "record")
    return path


@pytest.mark.slow
def test_what_is_written(folder: Path) -> None:
    assert [path.name for path in checkpoints(folder / "full")] == ["step_00000006", "step_00000004", "step_00000002"]
    found = sorted(path.name for path in (folder / "full").iterdir())
    assert found[:2] == [ownership.NAME, "step_00000002"]  # and nothing else hidden
    manifest = read(folder / "full" / "step_00000004")
    assert manifest.step == 4 and manifest.run["optimizer"] == "adamw" and manifest.run["seed"] == 0
    assert manifest.tensors["embed.weight"].shape == (23, 16)  # 24 rows are held
    assert "head.weight" not in manifest.tensors  # tied: once
    assert manifest.tensors["exp_avg_sq/blocks.1.qkv.weight"].shape == (48, 16)
    assert {len(saved.boxes) for name, saved in manifest.tensors.items() if "qkv" in name and "step" not in name} == {6}
    plan = json.loads((folder / "2x2x2" / "plan.json").read_text())
    held = {name for name, entry in plan["parameters"].items() if entry["stages"]}
    assert {name for name in manifest.tensors if "/" not in name} == held


def test_its_values_are_the_ranks_own(folder: Path) -> None:
    tensors = whole(folder / "full" / "step_00000004")
    record, _ = load(folder / "record" / "step_0004_rank_000.safetensors")
    assert torch.equal(tensors["blocks.0.norm.weight"], record["parameter/blocks.0.norm.weight"])
    assert torch.equal(tensors["embed.weight"][:12], record["parameter/embed.weight"])
    parts = record["parameter/blocks.0.qkv.weight"].view(3, 8, 16)
    assert torch.equal(tensors["blocks.0.qkv.weight"].view(3, 16, 16)[:, :8], parts)
    assert tensors["step/embed.weight"] == 4


@pytest.mark.slow
def test_the_same_mesh_continues_bit_by_bit(folder: Path, tmp_path: Path) -> None:
    arguments = ("--steps", STEPS, "--resume", folder / "full" / "step_00000002", "--record", tmp_path / "record")
    (tmp_path / "log").write_text((folder / "log").read_text())
    said = trained(folder / MESHES[0], *arguments, "--metrics", tmp_path / "log")
    assert "step 3/6" in said and "step 2/6" not in said and "after step 2" in said
    for step in range(HALF, STEPS):
        same_records(folder / "record", tmp_path / "record", step)
    assert losses(tmp_path / "log") == losses(folder / "log")


@pytest.mark.slow
def test_any_mesh_continues_any_other(folder: Path, tmp_path: Path) -> None:
    """A step on each mesh, from the checkpoint that the one before has left; pipelines turned round, too."""
    before = folder / "full" / "step_00000002"
    for step, mesh in enumerate(MESHES[1:], HALF + 1):
        arguments = ("--steps", step, "--resume", before, "--save", tmp_path / mesh, "--metrics", tmp_path / "log")
        trained(build(folder, mesh), *arguments)
        before = tmp_path / mesh / f"step_{step:08d}"
    assert losses(tmp_path / "log") == pytest.approx(losses(folder / "log")[HALF:], rel=1e-10)
    mine, theirs = whole(before), whole(folder / "full" / "step_00000006")
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_parts_with_spare_elements_go_on_anywhere(tmp_path: Path) -> None:
    """From three ranks, where every weight has spare elements, to two and back; none of them is in a checkpoint."""
    for mesh, level in (("dp=3", 1), ("dp=2", 2), ("pp=2,dp=3", 3)):
        how: dict[str, Any] = {"mesh": mesh, "microbatches": 2, "precision": "fp64", "zero": level}
        package = partc.compile(TIED, options={"batch": 12}, **how)
        assert mesh == "dp=2" or all(item.gather for item in package.program.parameters if item.name.startswith("bl"))
        package.write(tmp_path / mesh)
    straight = ("--steps", 4, "--save", tmp_path / "full", "--save-every", 1, "--keep", 9, "--record", tmp_path / "one")
    trained(tmp_path / "dp=3", *straight, "--metrics", tmp_path / "full.log")
    shapes = {name: saved.shape for name, saved in read(tmp_path / "full" / "step_00000001").tensors.items()}
    plan = json.loads((tmp_path / "dp=3" / "plan.json").read_text())
    held = {name: tuple(entry["shape"]) for name, entry in plan["parameters"].items() if entry["stages"]}
    assert held["embed.weight"] == (23, 16) and held["blocks.0.qkv.bias"] == (48,)
    assert all(shapes[name] == shape for name, shape in held.items())
    assert all(
        shapes[f"exp_avg/{name}"] == shape for name, shape in held.items() if plan["parameters"][name]["trainable"]
    )
    rest = ("--steps", 4, "--resume", tmp_path / "full" / "step_00000002", "--record", tmp_path / "two")
    trained(tmp_path / "dp=3", *rest)
    for step in (2, 3):
        same_records(tmp_path / "one", tmp_path / "two", step)
    before = tmp_path / "full" / "step_00000001"
    for step, mesh in ((2, "dp=2"), (3, "pp=2,dp=3"), (4, "dp=3")):
        save = ("--save", tmp_path / f"then {mesh}", "--metrics", tmp_path / "log")
        trained(tmp_path / mesh, "--steps", step, "--resume", before, *save)
        before = tmp_path / f"then {mesh}" / f"step_{step:08d}"
    assert losses(tmp_path / "log") == pytest.approx(losses(tmp_path / "full.log")[1:], rel=1e-10)
    mine, theirs = whole(before), whole(tmp_path / "full" / "step_00000004")
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "noisy"])
def test_running_statistics_and_random_numbers_go_on(tmp_path: Path, name: str) -> None:
    for mesh in ("tp=2", "dp=2"):
        partc.compile(TIED.with_name(f"{name}.py"), mesh=mesh, precision="fp64").write(tmp_path / mesh)
    trained(tmp_path / "tp=2", "--steps", 3, "--save", tmp_path / "full", "--save-every", 2)
    rest = ("--steps", 3, "--resume", tmp_path / "full" / "step_00000002")
    for mesh in ("tp=2", "dp=2"):
        trained(tmp_path / mesh, *rest, "--save", tmp_path / f"to {mesh}")
    ends = [whole(tmp_path / place / "step_00000003") for place in ("full", "to tp=2", "to dp=2")]
    assert all(torch.equal(x, ends[1][key]) for key, x in ends[0].items())
    for key, x in ends[0].items():
        torch.testing.assert_close(ends[2][key], x, rtol=1e-10, atol=1e-10)


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", ["2x2x2", "dp=2 zero 1"])
def test_loss_scales_and_the_rest_of_an_update_go_on(tmp_path: Path, mesh: str) -> None:
    package = build(tmp_path, mesh, precision="fp16")
    update = ("--clip", 0.5, "--warmup", 3, "--lr-schedule", "cosine", "--accumulate", 2, "--weight-decay", 0.1)
    trained(
        package, "--steps", 4, *update, "--save", tmp_path / "full", "--save-every", 2, "--record", tmp_path / "one"
    )
    half = tmp_path / "full" / "step_00000002"
    assert whole(half)["loss_scale"][1] == 2  # updates since it changed
    trained(package, "--steps", 4, "--resume", half, "--record", tmp_path / "two", "--save", tmp_path / "rest")
    same_records(tmp_path / "one", tmp_path / "two", 3)
    assert torch.equal(*(whole(tmp_path / place / "step_00000004")["loss_scale"] for place in ("full", "rest")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("2x2x2", {"compress_grads": "bf16", "bucket": "1KB"}),
        ("dp=4", {"compress_grads": "int8", "nodes": 2}),
        ("2x2x1", {"compress_grads": "int8", "zero": 2, "schedule": "zbv"}),
        ("dp=4", {"compress_grads": "bf16", "nodes": 2, "zero": 3}),
    ],
)
def test_what_compressed_sums_left_out_goes_on(tmp_path: Path, mesh: str, options: dict[str, Any]) -> None:
    package = build(tmp_path, mesh, precision="fp32", **options)
    save = ("--save", tmp_path / "full", "--save-every", 2)
    trained(package, "--steps", 4, *save, "--record", tmp_path / "one")
    half = tmp_path / "full" / "step_00000002"
    left = {name: x for name, x in whole(half).items() if name.startswith("left_out/")}
    assert left and all(x.any(1).all() for x in left.values()), "every rank has its own row"
    said = trained(package, "--steps", 4, "--resume", half, "--record", tmp_path / "two", "--save", tmp_path / "rest")
    assert "dropped" not in said
    for step in (2, 3):
        same_records(tmp_path / "one", tmp_path / "two", step)
    ends = [whole(tmp_path / place / "step_00000004") for place in ("full", "rest")]
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(x, ends[1][name]) for name, x in ends[0].items())
    for other, given in (("dp=2", {"compress_grads": "bf16"}), ("tp=2", {})):
        said = trained(build(tmp_path, other, precision="fp32", **given), "--steps", 3, "--resume", half)
        assert said.count("discarded the error feedback of compressed gradients") == 1


def test_only_the_newest_are_kept(folder: Path, tmp_path: Path) -> None:
    package, save = build(folder, "dp=2"), tmp_path / "save"
    (save / ".step_00000001.interrupted").mkdir(parents=True)
    (save / "notes.txt").write_text("mine")
    trained(package, "--steps", 4, "--save", save, "--save-every", 1, "--keep", 2, "--optimizer", "sgd")
    found = sorted(path.name for path in save.iterdir())
    assert found == [ownership.NAME, "notes.txt", "step_00000003", "step_00000004"]
    said = trained(package, "--steps", 5, "--save", save, "--save-every", 1, "--keep", 2, "--resume")
    assert "after step 4" in said and [path.name for path in checkpoints(save)] == ["step_00000005", "step_00000004"]
    assert read(save / "step_00000005").run["optimizer"] == "sgd"  # as before
    said = trained(package, "--steps", 5, "--save", save, "--resume")
    assert "loss" not in said and "nothing is left to do" in said


def test_resume_where_nothing_has_been_saved_yet(folder: Path, tmp_path: Path) -> None:
    said = trained(build(folder, "dp=2"), "--steps", 1, "--save", tmp_path / "new", "--resume")
    assert "starting at the beginning" in said and (tmp_path / "new" / "step_00000001").is_dir()


@pytest.mark.slow
@pytest.mark.processes
def test_processes_continue_bit_by_bit_and_on_virtual_ranks(folder: Path, tmp_path: Path) -> None:
    package, save = build(folder, "tp=2"), tmp_path / "save"
    whole_run = ("--steps", STEPS, "--record", tmp_path / "whole", "--metrics", tmp_path / "log")
    trained(package, *whole_run, "--save", save, "--save-every", HALF, real=True)
    rest = ("--steps", STEPS, "--resume", save / "step_00000002")
    trained(package, *rest, "--record", tmp_path / "rest", real=True)
    for step in range(HALF, STEPS):
        same_records(tmp_path / "whole", tmp_path / "rest", step)
    trained(build(folder, "2x2x2"), *rest, "--save", tmp_path / "virtual", "--metrics", tmp_path / "virtual.log")
    assert losses(tmp_path / "virtual.log") == pytest.approx(losses(tmp_path / "log")[HALF:], rel=1e-10)


def test_torch_reads_it(folder: Path) -> None:
    """torch.distributed.checkpoint, with its reader for safetensors files, as an independent witness."""
    pytest.importorskip("safetensors")
    checkpointing = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    from tests.models import tied

    path = folder / "full" / "step_00000004"
    model = tied.model().double()
    state = {name: x for name, x in model.state_dict().items() if not name.startswith("unused")}
    tensors = whole(path)
    moments = {
        name: torch.zeros_like(x) for name, x in tensors.items() if name.startswith("exp_avg") or "step/" in name
    }
    checkpointing.load(
        state | moments,
        storage_reader=checkpointing.HuggingFaceStorageReader(str(path)),
        planner=DefaultLoadPlanner(allow_partial_load=True),
        no_dist=True,
    )
    assert len(moments) > 30
    for name, x in (state | moments).items():
        assert torch.equal(x, tensors["embed.weight" if name == "head.weight" else name]), name
