"""Torn or damaged checkpoints, and those of another model, are refused with a code; nothing is overwritten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from partc.explain import CATALOGUE
from partc.runtime.checkpoint.manifest import checkpoints
from partc.runtime.checkpoint.restore import Say
from partc.runtime.errors import UsageError
from partc.runtime.processes import ownership
from partc.runtime.processes.agreement import Together
from partc.runtime.torch_private import lone_store
from partc.runtime.train.command_line import parse
from partc.runtime.train.job import prepared
from tests.durable import build, train, trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damage")
    trained(build(path, "dp=2"), "--steps", 3, "--save", path / "save", "--save-every", 1)
    return path


def contents(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file() and file.name != ownership.NAME)
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def cut(path: Path) -> None:
    file = path / "rank_000.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def flip(path: Path) -> None:
    file = path / "rank_001.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 4
    file.write_bytes(data)


def lose(path: Path) -> None:
    (path / "rank_001.safetensors").unlink()


def no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def half_a_manifest(path: Path) -> None:
    file = path / "manifest.json"
    file.write_text(file.read_text()[:700])


def another_step(path: Path) -> None:
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"step": 3', '"step": 4'))


def another_format(path: Path) -> None:
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"partc_checkpoint": 1', '"partc_checkpoint": 2'))


def not_ours(path: Path) -> None:
    (path / "manifest.json").write_text("[1, 2]")


DAMAGE: dict[Callable[[Path], None], str] = {
    cut: "rank_000.safetensors has",
    flip: "the content of rank_001.safetensors has changed",
    lose: "rank_001.safetensors is missing",
    no_manifest: "manifest.json cannot be read: No such file",
    half_a_manifest: "is not JSON",
    another_step: "has been changed",
    another_format: "has format 2",
    not_ours: "not that of a partc checkpoint",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_or_passed_over(folder: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save = tmp_path / "save"
    shutil.copytree(folder / "save", save)
    damage(save / "step_00000003")
    before = contents(save)
    arguments = ("--steps", 4, "--resume", save / "step_00000003", "--save", save)
    error = refused(build(folder, "dp=2"), *arguments)
    assert error.code == "P0524" and DAMAGE[damage] in error.cause and contents(save) == before
    if damage not in (flip, cut):  # one for each of the two ways to find it
        return
    done = train(build(folder, "dp=2"), *arguments)
    assert done.returncode == 2 and done.stderr.startswith("error P0524") and "Traceback" not in done.stderr
    said = trained(build(folder, "dp=2"), "--steps", 4, "--resume", "--save", save, "--save-every", 1)
    assert "passed over" in said and DAMAGE[damage] in said and "after step 2" in said
    assert [path.name for path in checkpoints(save)] == ["step_00000004", "step_00000003", "step_00000002"]
    (aside,) = save.glob("step_00000003.damaged.*")
    assert contents(aside) == {
        name.removeprefix("step_00000003/"): data for name, data in before.items() if name.startswith("step_00000003/")
    }


def test_none_is_whole(folder: Path, tmp_path: Path) -> None:
    save = tmp_path / "save"
    shutil.copytree(folder / "save", save)
    for path in checkpoints(save):
        flip(path)
    said: list[str] = []
    error = refused(build(folder, "dp=2"), "--resume", "--save", save, say=said.append)
    assert error.code == "P0524" and "none of the 3" in error.cause
    assert [line.partition(":")[0] for line in said] == ["passed over"] * 3


def test_other_models(folder: Path, tmp_path: Path) -> None:
    plan = json.loads((build(folder, "dp=2") / "plan.json").read_text())
    known = plan["parameters"]
    others = {
        "its 'embed.weight' is f64[23, 16], here it is f64[23, 32]": {
            "embed.weight": {"shape": [23, 32], "layout": "[24, 32]"}
        },
        "it has no 'more.bias', which is f64[16] here": {"more.bias": known["blocks.0.norm.bias"]},
        "it has 'blocks.1.norm.bias', which is unknown here": {"blocks.1.norm.bias": None},
        "its 'scale' is f64[], here it is f32[]": {"scale": {"dtype": "f32"}},
    }
    for why, changes in others.items():
        changed = {name: {**known.get(name, {}), **entry} if entry else None for name, entry in changes.items()}
        parameters = {name: entry for name, entry in (known | changed).items() if entry}
        (tmp_path / "plan.json").write_text(json.dumps({**plan, "parameters": parameters}))
        error = refused(tmp_path, "--resume", folder / "save")
        assert error.code == "P0525" and why in error.cause


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--save", "SAVE"), "P0522"),
        (("--resume", "SAVE/step_00000001", "--save", "SAVE"), "P0522"),
        (("--resume", "NOWHERE"), "P0523"),
        (("--resume", "SAVE/step_00000009"), "P0523"),
        (("--resume",), "P0521"),
        (("--resume", "SAVE", "--optimizer", "sgd"), "P0521"),
        (("--resume", "SAVE", "--seed", "7"), "P0521"),
        (("--resume", "SAVE", "--accumulate", "3"), "P0521"),
        (("--save", "NEW", "--save-every", "0"), "P0521"),
        (("--save", "NEW", "--keep", "0"), "P0521"),
        (("--resume", "SAVE", "--save", "OTHER"), "P0522"),
    ],
)
def test_wrong_use(folder: Path, tmp_path: Path, arguments: tuple[str, ...], code: str) -> None:
    before = contents(folder / "save")
    shutil.copytree(folder / "save" / "step_00000001", tmp_path / "other" / "step_00000001")
    places = {
        "SAVE": folder / "save",
        "NOWHERE": tmp_path,
        "NEW": tmp_path / "new",
        "OTHER": tmp_path / "other",
    }
    given = [replaced(argument, places) for argument in arguments]
    error = refused(build(folder, "dp=2"), *given)
    assert error.code == code and code in CATALOGUE and contents(folder / "save") == before


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    package = build(folder, "dp=2")
    done = train(package, "--steps", 1, "--save", package / "plan.json")
    assert done.returncode == 2 and "error P0526" in done.stderr and "Traceback" not in done.stderr


def refused(package: Path, *arguments: object, say: Say = lambda line: None) -> UsageError:
    with pytest.raises(UsageError) as caught:
        prepared(parse(list(map(str, arguments)), package), Together(lone_store(), 0, 1), say)
    return caught.value


def replaced(argument: str, places: dict[str, Path]) -> str:
    head, slash, rest = argument.partition("/")
    return f"{places[head]}{slash}{rest}" if head in places else argument


def test_the_learning_rate_may_change(folder: Path, tmp_path: Path) -> None:
    save = tmp_path / "save"
    trained(build(folder, "dp=2"), "--steps", 4, "--resume", folder / "save", "--lr", 0.5, "--save", save)
    assert json.loads((save / "step_00000004" / "manifest.json").read_text())["run"]["lr"] == 0.5
