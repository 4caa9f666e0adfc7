"""The planner as people use it: `--mesh auto`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partc
from partc.cli import main
from partc.errors import PartcError

MLP = str(Path(__file__).parents[1] / "examples" / "mlp.py")
FIX = "schedule=1f1b,recompute=none,zero=0|1"
AUTO = ("--mesh", "auto", "--cluster", "4xCPU", "--batch", "16", "--precision", "fp64", "--fix", FIX)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def compiled(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main(["compile", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_mesh_that_partc_chooses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The package is that of the options that are printed, but for the prediction in its plan."""
    code = main(["compile", MLP, *AUTO, "-o", str(tmp_path / "auto")])
    said = capsys.readouterr().out
    assert code == 0, said
    again = next(line for line in said.splitlines() if line.startswith("the same again: partc "))
    words = again.removeprefix("the same again: partc ").split()
    assert main([*words, "-o", str(tmp_path / "given")]) == 0
    mine, given = files(tmp_path / "auto"), files(tmp_path / "given")
    plan = json.loads(mine.pop("plan.json"))
    planned = plan.pop("planned")
    assert plan == json.loads(given.pop("plan.json"))
    assert {**mine, "files.sha256": b""} == {**given, "files.sha256": b""}
    assert planned["cluster"] == "4xCPU" and planned["gap"] == 0 and planned["step_seconds"] > 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "auto"), "--virtual", "--steps", "1"]) == 0


def test_a_model_object_on_a_cluster() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    package = partc.compile(
        model,
        {"input": torch.randn(8, 8)},
        mesh="auto",
        cluster="2xCPU",
        fix="dp=2",
        precision="fp64",
        loss=_square,
        optimizer="sgd",
    )
    assert package.program.mesh.axis("dp") == 2 and package.planned is not None
    assert package.verify(steps=2).ok


def _square(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    out: torch.Tensor = model(batch["input"]).square().mean()
    return out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--mesh", "auto"), "P0816"),
        (("--mesh", "2", "--cluster", "4xCPU"), "P0816"),
        (("--mesh", "2", "--max-seconds", "3"), "P0816"),
        ((*AUTO, "--zero", "1"), "P0815"),
        ((*AUTO, "--microbatches", "1"), "P0815"),
        ((*AUTO, "--ranks", "8"), "P0803"),
        ((*AUTO, "--memory", "1KB"), "P0813"),
        ((*AUTO, "--global-batch", "8"), "P0814"),
        (("--mesh", "auto", "--cluster", "4xCPU", "--max-seconds", "nan"), "P0004"),
        (("--mesh", "auto", "--cluster", "4xABC"), "P0802"),
        (("--mesh", "auto", "--plan", "plan.json", "--cluster", "4xCPU"), "P0804"),
    ],
)
def test_refusals_of_auto(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: str
) -> None:
    status, found = compiled(capsys, MLP, *arguments, "-o", tmp_path / "build")
    assert (status, found["error"]["code"]) == (2, code)
    assert not (tmp_path / "build").exists()


def test_the_function_refuses_alike() -> None:
    for given, code in (
        ({"mesh": "auto"}, "P0816"),
        ({"mesh": "2", "cluster": "2xCPU"}, "P0816"),
        ({"mesh": "auto", "cluster": "2xCPU", "zero": 2}, "P0815"),
    ):
        with pytest.raises(PartcError) as caught:
            partc.compile(MLP, **given)  # type: ignore[arg-type]
        assert caught.value.code == code
