"""The planner as people use it: `--mesh auto` and `partc replan`."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partc
from partc.cli import main
from partc.errors import PartcError
from tests.durable import losses, trained, whole

MLP = str(Path(__file__).parents[1] / "examples" / "mlp.py")
FIX = "schedule=1f1b,recompute=none,zero=0|1"
AUTO = ("--mesh", "auto", "--cluster", "4xCPU", "--batch", "16", "--precision", "fp64", "--fix", FIX)

LEARNER = """
import torch
from torch import nn
from torch.nn import functional as F

class Rows:
    '''A loader with a state: its batches follow from a generator, not from the number of a step.'''

    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self):
        while True:
            x = torch.randn(12, 6, generator=self.generator, dtype=torch.float64)
            yield {"x": x, "labels": (x.sum(1) > 0).long()}

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])

def model(width: int = 8):
    blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(3)]
    return nn.Sequential(nn.Linear(6, width), *blocks, nn.Linear(width, 2))

def batch():
    return {"x": torch.randn(12, 6), "labels": torch.randint(0, 2, (12,))}

def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["labels"])

def data():
    return Rows()
"""


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


def plain(path: Path, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and parameters of a loop on one device: AdamW, two batches a step, clipped gradients."""
    spec = importlib.util.spec_from_file_location("plain_learner", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model: nn.Module = module.model(12).double()
    optimizer, batches, found = torch.optim.AdamW(model.parameters(), lr=0.01), iter(module.Rows()), []
    for _ in range(steps):
        optimizer.zero_grad()
        parts = [module.loss(model, next(batches)) / 2 for _ in range(2)]
        total = torch.stack(parts).sum()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found.append(total.item())
    return found, dict(model.named_parameters())


def test_a_training_goes_on_on_fewer_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three steps on four processes, three more on the two of a smaller cluster: as six steps on one device."""
    file = tmp_path / "learner.py"
    file.write_text(LEARNER)
    first, second, saves = tmp_path / "first", tmp_path / "second", tmp_path / "saves"
    partc.compile(file, mesh="pp=2,dp=2", microbatches=3, zero=2, precision="fp64", options={"width": 12}).write(first)
    recipe = ("--optimizer", "adamw", "--lr", 0.01, "--accumulate", 2, "--clip", 0.5, "--save", saves)
    trained(first, "--steps", 3, *recipe, "--metrics", tmp_path / "a", real=True)
    cluster = tmp_path / "smaller.toml"
    cluster.write_text('nodes = 1\ndevices = 2\ndevice = "CPU"\n')
    given = ["--cluster", str(cluster), "--checkpoint", str(saves), "-o", str(second), "--fix", "tp=2,recompute=none"]
    assert main(["replan", str(first), *given, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    plan = json.loads((second / "plan.json").read_text())
    assert (report["step"], report["planned"]["cluster"], plan["mesh"]) == (3, "smaller", "tp=2")
    assert (plan["options"], plan["precision"], plan["seed"]) == ({"width": 12}, "fp64", 0)
    trained(second, "--steps", 6, "--save", saves, "--resume", "--metrics", tmp_path / "b", real=True)
    expected, parameters = plain(file, 6)
    assert [*losses(tmp_path / "a"), *losses(tmp_path / "b")] == pytest.approx(expected, rel=1e-10)
    held = whole(saves / "step_00000006")
    for name, parameter in parameters.items():
        torch.testing.assert_close(held[name], parameter.detach(), rtol=1e-9, atol=1e-11)

    damaged = tmp_path / "damaged"
    shutil.copytree(saves / "step_00000003", damaged / "step_00000003")
    (damaged / "step_00000003" / "manifest.json").write_text("{")
    other = tmp_path / "other"
    partc.compile(file, mesh="1", precision="fp64").write(other)
    for arguments, code in (
        ((tmp_path, *given), "P0503"),
        ((first, "--checkpoint", tmp_path / "none", "--cluster", "2xCPU", "-o", tmp_path / "x"), "P0523"),
        ((first, "--checkpoint", damaged, "--cluster", "2xCPU", "-o", tmp_path / "x"), "P0524"),
        ((other, "--checkpoint", saves, "--cluster", "2xCPU", "-o", tmp_path / "x"), "P0525"),
        ((first, "--cluster", "2xCPU", "-o", first), "P0601"),
        ((first, "-o", tmp_path / "x"), "P0816"),
        ((first, "--cluster", "7xCPU", "-o", tmp_path / "x", "--fix", "pp=1,tp=1,cp=1"), "P0812"),
    ):
        assert main(["replan", *map(str, arguments), "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["error"]["code"] == code
