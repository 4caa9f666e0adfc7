"""Error codes: each one used is explained, each one explained is used, and each one reaches the user with its text."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import partc
from partc.errors import PartcError, Source
from partc.explain import AREAS, CATALOGUE, explanation, listing
from partc.frontend.model_files.huggingface import model_source
from partc.package.verify import verify
from partc.passes.normalize import writer

NET = """import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 1)

    def forward(self, x):
        return self.up(x).sum()

def model():
    return Net()

def batch():
    return {"x": torch.randn(8, 8)}
"""
ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("partc", "passes", "codegen", "templates")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".jinja") and path.name != "explain.py"
]
IN_CODE = re.compile(r'"(P\d{4})"')
RAISED = re.compile(r'PartcError\(\s*"(P\d{4})"')
ANYWHERE = re.compile(r"\bP\d{4}\b")


def test_every_code_in_the_tree_is_explained() -> None:
    used = {code: path for path in SOURCES for code in ANYWHERE.findall(path.read_text())}
    assert {code: str(path) for code, path in used.items() if code not in CATALOGUE} == {}


def test_every_explained_code_is_used() -> None:
    used = {code for path in SOURCES for code in IN_CODE.findall(path.read_text())}
    raised = set(RAISED.findall((ROOT / "partc" / "explain.py").read_text()))
    assert set(CATALOGUE) - used - raised == set()


def test_every_explained_code_is_tested() -> None:
    tests = [path for path in sorted((ROOT / "tests").rglob("*.py"))]
    tested = {code for path in tests for code in ANYWHERE.findall(path.read_text())}
    assert set(CATALOGUE) - tested == set()


def test_a_tensor_where_none_stands() -> None:
    with pytest.raises(PartcError) as failure:
        writer.ref(3)
    assert failure.value.code == "P0213"


def test_a_parameter_that_the_model_file_no_longer_makes(tmp_path: Path) -> None:
    model = tmp_path / "net.py"
    model.write_text(NET)
    partc.compile(model, mesh="2").write(tmp_path / "build")
    copy = tmp_path / "build" / "model.py"
    copy.write_text(NET.replace("self.up", "self.other"))
    with pytest.raises(PartcError, match=r"P0502: .* makes no parameter 'up\.weight', which the plan has"):
        verify(tmp_path / "build", steps=1, virtual=True)


def test_transformers_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PartcError) as failure:
        model_source(f"hf:{tmp_path / 'config.json'}")
    assert failure.value.code == "P0233"


def test_codes_named_in_the_documentation_exist() -> None:
    pages = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    named = {code for page in pages for code in ANYWHERE.findall(page.read_text())}
    assert named and named <= set(CATALOGUE)


def test_the_catalogue_is_ordered_and_complete() -> None:
    assert list(CATALOGUE) == sorted(CATALOGUE)
    for code, entry in CATALOGUE.items():
        assert code[:3] in AREAS
        assert not entry.title.endswith(".") and len(entry.title) < 80
        assert len(entry.text) > 15
        assert code in listing()


@pytest.mark.parametrize("spelling", ["P0103", "p0103", " P0103 "])
def test_explanation(spelling: str) -> None:
    assert explanation(spelling).startswith("P0103: an unknown axis\n\n")


@pytest.mark.parametrize("code", ["P9999", "103", ""])
def test_no_such_code(code: str) -> None:
    with pytest.raises(PartcError) as failure:
        explanation(code)
    assert failure.value.code == "P0002"


def test_an_error_reads_as_place_code_cause_help() -> None:
    error = PartcError("P0401", "a batch of 7 does not divide", help="use 8", source=Source(file="m.py", line=3))
    assert str(error) == "m.py:3: error P0401: a batch of 7 does not divide\n  help: use 8"
    assert str(PartcError("P0401", "no")) == "error P0401: no"


def test_an_error_in_a_library_module_names_the_module() -> None:
    with pytest.raises(PartcError) as failure:
        partc.compile(nn.Sequential(nn.Linear(4, 3)), {"input": torch.randn(2, 4)}, mesh="1")
    assert str(failure.value).startswith("module 0: error P0208: the loss has shape (2, 3)")
