"""partc.compile takes the options of the command line, for files and for objects."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import partc
from partc.compilation.given_options import DEFAULTS
from partc.errors import PartcError
from partc.garbage_collection import THRESHOLDS
from partc.ir.mesh import Mesh
from partc.rules.table import TABLE
from tests.prefork import done

ROOT = Path(__file__).parents[2]
MLP = ROOT / "examples" / "mlp.py"
SMALL = {"depth": 2, "width": 12, "hidden": 20, "batch": 12}

# The tests' own models live in a module that a package can import: a top-level one.
sys.path.append(str(ROOT / "tests" / "models"))
import given_models  # noqa: E402


def x(rows: int = 12) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 5, generator=torch.Generator().manual_seed(3))}


def test_a_file_compiles_to_a_package(tmp_path: Path) -> None:
    phases: list[str] = []
    package = partc.compile(
        MLP,
        mesh="2x1x2",
        microbatches=2,
        precision="fp64",
        options=SMALL,
        on_phase=lambda phase: phases.append(phase.label),
    )
    assert isinstance(package, partc.Package)
    assert package.program.mesh == Mesh.parse("2x1x2") == package.options.mesh
    assert phases[:2] == ["Loaded", "Traced"] and list(package.phases) == phases
    assert package.communication["pp"] > 0 and package.report["ranks"] == 4
    folder = package.write(tmp_path / "build")
    assert (folder / "model.py").read_text() == MLP.read_text()
    assert {name for name, _ in package.files()} <= {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    }


def test_files_are_rendered_when_asked_for() -> None:
    package = partc.compile(MLP, mesh="4", options=SMALL)
    assert next(package.files())[0] == "plan.json"


def test_a_module_keeps_its_parameters() -> None:
    model = given_models.Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    package = partc.compile(model, x(), mesh="1x2x2", precision="fp64", loss=given_models.loss)
    assert {"model.pt", "batch.pt", "sources/given_models.py"} == set(package.extra)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    result = package.verify(steps=2)
    assert result.ok
    wanted = given_models.loss(model.double(), {"x": x()["x"].double()}).item()
    assert result.losses[0] == pytest.approx(wanted, rel=1e-12)


def test_a_function_is_imported_by_its_package() -> None:
    package = partc.compile(given_models.build, x(), mesh="tp=2", loss=given_models.loss)
    assert set(package.extra) == {"batch.pt", "sources/given_models.py"}
    assert "from given_models import build as model\nfrom given_models import loss\n" in package.model_source
    assert package.verify(steps=1).ok


def test_the_garbage_collector_rarely_runs_in_a_compile() -> None:
    before, seen = gc.get_threshold(), set()
    partc.compile(MLP, mesh="2", on_phase=lambda phase: seen.add(gc.get_threshold()))
    assert seen == {THRESHOLDS} and gc.get_threshold() == before
    with pytest.raises(PartcError):
        partc.compile(MLP, mesh="none")
    assert gc.get_threshold() == before


@pytest.mark.slow
def test_a_script_is_imported_too(tmp_path: Path) -> None:
    script = tmp_path / "my-script.py"
    script.write_text(
        "import torch, partc\nfrom torch import nn\n\n"
        "def build():\n    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))\n\n"
        "def loss(model, batch):\n    return model(batch['input']).sum()\n\n"
        "if __name__ == '__main__':\n"
        "    package = partc.compile(build, {'input': torch.randn(4, 3)}, loss=loss, mesh='2')\n"
        f"    package.write({str(tmp_path / 'build')!r})\n"
    )
    compiled = done([script], {"PYTHONPATH": str(ROOT)})
    assert compiled.returncode == 0, compiled.stderr
    assert "from given_model import build as model" in (tmp_path / "build" / "model.py").read_text()
    ended = done(["train.py", "--virtual", "--steps", "1"], cwd=tmp_path / "build")
    assert ended.returncode == 0, ended.stderr


def test_a_function_that_its_module_does_not_hold_is_refused() -> None:
    spec = importlib.util.spec_from_file_location("unregistered_models", given_models.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(PartcError, match=r"'unregistered_models' of build is not in sys\.modules") as refused:
        partc.compile(module.build, x(), mesh="2")
    assert refused.value.code == "P0215"


def test_what_is_no_model_is_said() -> None:
    class Local(nn.Module):
        pass

    for model, batch, code in (
        (3, x(), "P0214"),
        (given_models.build, None, "P0214"),
        (given_models.build, {"x": 3}, "P0214"),
        (given_models.build, [], "P0214"),
        (lambda: given_models.Net(), x(), "P0215"),
        (lambda: 3, x(), "P0215"),
    ):
        with pytest.raises(PartcError) as failure:
            partc.compile(model, batch, mesh="2")
        assert failure.value.code == code


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"mesh": "2x"}, "P0101"),
        ({"mesh": "2", "microbatches": 0}, "P0405"),
        ({"mesh": "2", "schedule": "zigzag"}, "P0404"),
        ({"mesh": "2", "precision": "fp12"}, "P0404"),
        ({"mesh": "2", "shard": ["oops"]}, "P0301"),
        ({"mesh": 2}, "P0004"),
        ({"mesh": "2", "microbatches": "4"}, "P0004"),
        ({"mesh": "2", "shard": "w=[@dp, _]"}, "P0004"),  # whose characters would be pins
        ({"mesh": "2", "seed": True}, "P0004"),
    ],
)
def test_options_are_checked_first(given: dict[str, object], code: str) -> None:
    with pytest.raises(PartcError) as failure:
        partc.compile("no such file", **given)  # type: ignore[arg-type]
    assert failure.value.code == code


def test_rules_are_registered_under_the_same_name() -> None:
    partc.rule("testlib::scale", "x[b d], w[d] -> [b d]")
    try:
        assert TABLE["testlib::scale"].user
    finally:
        del TABLE["testlib::scale"]


def test_the_front_door() -> None:
    assert set(partc.__all__) <= set(dir(partc))
    assert partc.Mesh is Mesh
    with pytest.raises(AttributeError, match="no attribute 'optimize'"):
        partc.optimize  # noqa: B018


def test_the_defaults_are_those_of_the_command_line() -> None:
    parameters = inspect.signature(partc.compile).parameters
    assert {name: parameters[name].default for name in DEFAULTS} == DEFAULTS
