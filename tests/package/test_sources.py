"""A package contains the user's own modules, so that it runs with torch alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import partc
from partc.errors import PartcError
from tests.prefork import done

ROOT = Path(__file__).parents[2]


PROJECT = {
    "job.py": """
import torch
import torch.nn.functional as F
from model import Net
import nets.sizes as sizes

def model():
    from late import width
    assert width == sizes.WIDTH
    return Net()

def batch():
    return {"x": torch.randn(8, sizes.WIDTH)}

def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["x"])
""",
    "late.py": "width = 6\n",
    "model.py": """
from torch import nn
from nets import Block

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
""",
    "nets/__init__.py": "from .block import Block\n",
    "nets/block.py": """
from torch import nn
from . import sizes

class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(sizes.WIDTH, 12), nn.ReLU(), nn.Linear(12, sizes.WIDTH))
""",
    "nets/sizes.py": "WIDTH = 6\n",
    "unread.py": "raise RuntimeError\n",
}


def _project(folder: Path) -> Path:
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "job.py"


@pytest.fixture(autouse=True)
def _forgotten() -> object:
    """Each test's project is imported anew."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {"model", "nets", "late", "runtime", "project"}:
            del sys.modules[name]


def _train(package: Path) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    ended = done([package / "train.py", "--virtual", "--steps", "1"], environment, cwd=Path("/"))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_a_model_file_among_others(tmp_path: Path) -> None:
    """One of them is called model.py, as the package's own copy of the model file is."""
    package = partc.compile(_project(tmp_path / "project"), mesh="2x2", microbatches=2, precision="fp64")
    files = {"late.py", "model.py", "nets/__init__.py", "nets/block.py", "nets/sizes.py"}
    assert set(package.extra) == {f"sources/{name}" for name in files}
    assert package.verify().ok
    folder = package.write(tmp_path / "build")
    (tmp_path / "project").rename(tmp_path / "gone")
    _train(folder)
    inspected = done(["-m", "partc", "inspect", folder, "--after", "trace"], cwd=ROOT)
    assert inspected.returncode == 0, inspected.stderr


@pytest.mark.slow
def test_a_function_in_a_package_of_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    _project(tmp_path / "project")
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    from nets.block import Block  # type: ignore[import-not-found]

    package = partc.compile(Block, {"input": torch.randn(8, 6)}, loss=squares, mesh="2", precision="fp64")
    assert {"sources/nets/__init__.py", "sources/nets/block.py", "sources/nets/sizes.py"} <= set(package.extra)
    folder = package.write(tmp_path / "build")
    monkeypatch.undo()
    _train(folder)


def squares(model: object, batch: dict[str, object]) -> object:
    return model(batch["input"]).square().mean()  # type: ignore[operator]


def test_a_name_that_packages_have_is_refused(tmp_path: Path) -> None:
    path = _project(tmp_path)
    (tmp_path / "runtime.py").write_text("SIZE = 3\n")
    path.write_text("import runtime\n" + path.read_text())
    with pytest.raises(PartcError) as refused:
        partc.compile(path, mesh="2")
    assert refused.value.code == "P0215" and refused.value.source is not None and refused.value.source.line == 1
