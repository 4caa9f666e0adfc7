"""examples/text_gpt.py: data from a file outside the package, and a run in two parts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

import partc
from partc.cli import main
from partc.package.verify import verify
from partc.runtime.errors import UsageError
from partc.runtime.train.data import global_batch, load_model_file

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "build"
    (path.parent / "book.txt").write_bytes(bytes(range(256)) * 4)
    options = {"depth": 2, "width": 32, "text": str(path.parent / "book.txt")}
    partc.compile(str(EXAMPLES / "text_gpt.py"), mesh="2x2", precision="fp64", microbatches=2, options=options).write(
        path
    )
    return path


@pytest.mark.slow
def test_a_package_takes_its_data_from_where_an_option_says(package: Path) -> None:
    assert (package / "sources" / "gpt.py").read_bytes() == (EXAMPLES / "gpt.py").read_bytes()
    module = load_model_file(package / "model.py")
    options = {"depth": 2, "width": 32, "text": str(package.parent / "book.txt")}
    first, again, other = (
        global_batch(module, options, seed=seed, step=step, dtype=torch.float64)
        for seed, step in ((0, 3), (9, 3), (0, 4))
    )
    assert torch.equal(first["ids"], again["ids"]) and not torch.equal(first["ids"], other["ids"])
    assert torch.equal(first["labels"], (first["ids"] + 1) % 256), "the file counts up"
    assert verify(package, virtual=True).ok


def test_data_beside_the_model_file_and_no_data_at_all(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(package, tmp_path / "moved")
    module = load_model_file(tmp_path / "moved" / "model.py")
    with pytest.raises(
        UsageError, match=r"P0530: data\(2\) of the model file fails \(model\.py:\d+\): FileNotFoundErr"
    ):
        global_batch(module, {}, seed=0, step=2, dtype=torch.float64)
    shutil.copy(EXAMPLES / "alice29.txt", tmp_path / "moved")
    batch = global_batch(module, {}, seed=0, step=2, dtype=torch.float64)
    assert bytes(batch["ids"][0].tolist()).isascii() and batch["ids"].shape == (16, 128)


def test_an_option_that_data_alone_takes_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["compile", str(EXAMPLES / "text_gpt.py"), "--mesh", "2", "-D", "txet=x", "-o", str(tmp_path / "b")]) == 2
    )
    assert "its options are depth, text, width" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.matrix
def test_a_run_cut_in_two_lies_on_that_of_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.benchmarks import text_run

    picture = tmp_path / "p.svg"
    arguments = ["--steps", "40", "--precision", "fp64", "--allowed", "1e-10", "--picture", str(picture)]
    monkeypatch.setattr(sys, "argv", ["text_run.py", *arguments])
    assert text_run.main() == 0
    assert picture.read_text().count("<polyline") == 3
