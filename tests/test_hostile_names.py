"""Names from outside are data: each place takes any of them, or refuses it with a code, and none is ever run."""

from __future__ import annotations

from pathlib import Path

import pytest

from partc.cli import main
from tests.models.hostile import NAMES

MODEL = Path(__file__).parent / "models" / "hostile.py"


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Every payload would leave a file in the current folder."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("layers", ["--mesh", "1x1x2"]),
        ("stores", ["--mesh", "1x2x1", "--zero", "3"]),
        ("lists", ["--mesh", "2x1x2", "--microbatches", "2"]),
        ("lists", ["--mesh", "2x2x1", "--zero", "2", "--schedule", "zero-bubble", "--microbatches", "2"]),
        ("entries", ["--mesh", "2x2x1", "--microbatches", "2"]),
    ],
)
def test_a_model_with_hostile_names_trains_as_on_one_device(place: str, how: list[str]) -> None:
    assert main(["compile", str(MODEL), "-D", f"place={place}", "--precision", "fp64", *how, "-o", "build"]) == 0
    assert main(["verify", "build", "--virtual", "--steps", "2"]) == 0


PLAIN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()

def model(text: str = ""):
    return Net()

def batch(text: str = ""):
    return {"x": torch.randn(8, 8)}
"""
LONE = ("a\ud800b", "\udfff", "\udc80")  # halves of characters, as a shell's argument may have them


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "net.py"
    path.write_text(PLAIN)
    return path


def given(name: str) -> list[list[str]]:
    """Arguments with a name from outside in every place that a command line has."""
    return [
        ["-D", f"text={name}"],
        ["-D", f"{name}=1"],
        ["--mesh", f"{name}=2"],
        ["--mesh", f"dp={name}"],
        ["--shard", f"{name}=[@tp]"],
        ["--shard", f"*.up.weight={name}"],
        ["--schedule", name],
        ["--zero", f"3@{name}"],
        ["--recompute", name],
        ["--cast", f"{name}=fp32"],
        ["--bucket", name],
        ["--memory-limit", name],
    ]


@pytest.mark.parametrize("name", ["names", "halves"])
def test_arguments_are_taken_or_refused(name: str, plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only text for the model file reaches a package; all else is refused before anything is traced."""
    for text in NAMES if name == "names" else LONE:
        for arguments in given(text)[1:]:
            mesh = [] if "--mesh" in arguments else ["--mesh", "2x1x2"]
            code = main(["compile", str(plain), *mesh, *arguments, "-o", "build"])
            told = capsys.readouterr()
            assert code in (0, 2) and (code == 0 or "error P0" in told.err), arguments
            assert (told.out + told.err).replace("\n", "").isprintable(), arguments
