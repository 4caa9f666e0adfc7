"""Files of the user, of the compiler and of the examples are told apart, whatever their folders are called."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import partc
from partc.cli import main
from partc.frontend.model_files.example_files import FILES
from partc.installed import is_installed, is_machinery, shortened

ROOT = Path(__file__).parents[2]
BROKEN = """import torch
from torch import nn

import layers

def model():
    return layers.Net()

def batch():
    return {"x": torch.randn(4, 8)}
"""
LAYERS = """import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 12)

    def forward(self, x):
        return self.up(x).view(5, 5).sum()
"""
FOLDERS = ("partc", "torch", "partc/passes", "src/torch/nn", "lib/python3.11", "site-packages", "ein Plätzchen/partc")


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_users_file_is_the_users_in_any_folder(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "layers", raising=False)
    place = tmp_path / folder
    place.mkdir(parents=True)
    (place / "net.py").write_text(BROKEN)
    (place / "layers.py").write_text(LAYERS)
    assert main(["compile", str(place / "net.py"), "--mesh", "2", "-o", str(tmp_path / "build")]) == 2
    assert capsys.readouterr().err.startswith(f"{place / 'layers.py'}:9: error P0206")
    (place / "layers.py").write_text(LAYERS.replace(".view(5, 5)", ""))
    monkeypatch.delitem(sys.modules, "layers", raising=False)
    assert main(["compile", str(place / "net.py"), "--mesh", "2", "-o", str(tmp_path / "build")]) == 0
    assert (tmp_path / "build" / "sources" / "layers.py").is_file()
    emitted = [path.read_text() for name in ("regions", "stages") for path in (tmp_path / "build" / name).glob("*.py")]
    assert any("layers.py:9" in text for text in emitted)
    sys.modules.pop("layers", None)


def test_machinery_is_known_by_its_place() -> None:
    package = Path(partc.__file__).parent
    for path in (
        package / "api.py",
        package / "passes" / "zero.py",
        ROOT / "passes" / "zero.py",
        torch.__file__,
    ):
        assert is_machinery(str(path)) and is_installed(Path(path))
    assert is_machinery(subprocess.__file__) and is_machinery("<frozen importlib._bootstrap>")
    site = Path(sysconfig.get_path("purelib"))
    assert not is_machinery(str(site / "transformers" / "modeling_utils.py"))
    assert is_installed(site / "transformers" / "modeling_utils.py")
    assert shortened(str(site / "transformers" / "x.py")) == "transformers/x.py"
    for path in (ROOT / "examples" / "gpt.py", ROOT / "tests" / "zoo.py", Path("/somewhere/torch/nn.py")):
        assert not is_machinery(str(path)) and not is_installed(path)
        assert shortened(str(path)) == str(path)


def test_examples_are_copied_and_never_over_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "examples"
    for _ in range(2):  # the same files may be copied again
        assert main(["examples", str(place)]) == 0
        assert sorted(path.name for path in place.iterdir()) == sorted(FILES)
    assert all((place / name).read_bytes() == (ROOT / "examples" / name).read_bytes() for name in FILES)
    assert "next: partc compile" in capsys.readouterr().out
    (place / "mlp.py").write_text("mine")
    (place / "gpt.py").unlink()
    assert main(["examples", str(place)]) == 2
    assert "P0609" in capsys.readouterr().err
    assert (place / "mlp.py").read_text() == "mine" and not (place / "gpt.py").exists()
    assert main(["examples", str(place / "text_gpt.py")]) == 2
    assert "P0602" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["examples/gpt.py", "text_gpt.py", "mine.py"])
def test_a_missing_model_file_names_the_examples(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compile", name, "--mesh", "2"]) == 2
    err = capsys.readouterr().err
    assert "P0201" in err and "partc examples" in err
