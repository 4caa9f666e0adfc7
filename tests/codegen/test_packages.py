"""Written packages are reproducible, equal those in the repository, and only need torch."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import partc

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# Packages of examples/gpt.py, for people to read and reviews to see change.
SHOWN: dict[str, dict[str, Any]] = {
    "gpt_2x2x2": {"mesh": "2x2x2", "microbatches": 4},
    "gpt_zero3_bf16": {"mesh": "1x2x2", "zero": 3, "recompute": "selective", "precision": "bf16", "kernels": "triton"},
}
REWRITE = "python -m tests.codegen.test_packages writes it anew"


def shown(name: str) -> dict[str, str]:
    """The files of a shown package by path, without copies of the runtime and of other files of the repository."""
    files = partc.compile(EXAMPLES / "gpt.py", **SHOWN[name]).files()
    copied = {path.read_text() for path in (EXAMPLES / "gpt.py", *(ROOT / "partc" / "kernels").glob("*.py"))}
    return {path: str(text) for path, text in files if not path.startswith("runtime/") and text not in copied}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package") / "build"
    partc.compile(EXAMPLES / "gpt.py", mesh="2x2x2", microbatches=4).write(folder)
    return folder


def test_two_compiles_are_byte_identical(build: Path, tmp_path: Path) -> None:
    partc.compile(EXAMPLES / "gpt.py", mesh="2x2x2", microbatches=4).write(tmp_path / "again")
    files = sorted(path.relative_to(build) for path in build.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*.*"))
    for file in files:
        assert (build / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file


@pytest.mark.parametrize("name", SHOWN)
def test_shown_code_is_what_is_emitted(name: str) -> None:
    files = shown(name)
    there = {str(path.relative_to(EXAMPLES / name)): path for path in (EXAMPLES / name).rglob("*") if path.is_file()}
    assert set(there) == set(files), f"other files than in examples/{name}: {REWRITE}"
    for path, text in files.items():
        assert there[path].read_text() == text, f"examples/{name}/{path} is old: {REWRITE}"


@pytest.mark.slow
def test_package_needs_torch_alone(build: Path) -> None:
    """Every other package that partc itself uses is made impossible to import."""
    blocked = ["partc", "jinja2", "scipy", "highspy", "sympy", "click", "rich", "safetensors", "transformers"]
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({blocked!r}));"
        f" sys.argv = ['train.py', '--virtual', '--steps', '2']; sys.path.insert(0, {str(build)!r});"
        f" runpy.run_path({str(build / 'train.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=build.parent, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 2/2" in done.stdout + done.stderr


def imported(path: str, text: str) -> set[str]:
    """Every module, and every name that may be one, which a package's file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = path.split("/")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found.update((base, *(f"{base}.{alias.name}" for alias in node.names)))
    return found


@pytest.mark.parametrize("kernels", ["aten", "triton", "inductor"])
def test_every_module_of_a_package_is_imported(kernels: str) -> None:
    """From train.py and the modules of ranks and stages, which it imports by number; and none of them is missing."""
    package = partc.compile(EXAMPLES / "gpt.py", mesh="2x2", microbatches=2, kernels=kernels)
    files = {path: str(text) for path, text in package.files() if path.endswith(".py")}
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files}
    todo = [name for name in modules if name.partition(".")[0] in ("train", "model", "ranks", "stages")]
    reached: set[str] = set()
    while todo:
        name = todo.pop()
        if name in reached or name not in modules:
            continue
        reached.add(name)
        found = imported(modules[name], files[modules[name]])
        owners = {
            ".".join(parts[:count]) for parts in (other.split(".") for other in found) for count in range(len(parts))
        }
        todo += [*found, *owners]
        ours = {other for other in found if other.partition(".")[0] in ("runtime", "stages", "regions", "kernels")}
        assert all(other in modules or other.rpartition(".")[0] in modules for other in ours), modules[name]
    assert reached == set(modules)
    assert ("runtime.ops.compiled" in modules) == (kernels == "inductor")


@pytest.mark.slow
def test_sixty_four_ranks_have_two_stage_modules(tmp_path: Path) -> None:
    partc.compile(EXAMPLES / "gpt.py", mesh="2x4x8", microbatches=2, options={"size": "8b"}).write(tmp_path / "b")
    assert len(list((tmp_path / "b" / "stages").glob("stage_*.py"))) == 2
    places = list((tmp_path / "b" / "ranks").glob("pp_*.py"))
    assert len(places) == 2 and max(len(path.read_text().splitlines()) for path in places) < 20
    stage = (tmp_path / "b" / "stages" / "stage_0.py").read_text()
    assert len(stage.splitlines()) < 500, "32 blocks are one body in a loop"


CLASHING = """
import torch
from torch import nn

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 12)

    def forward(self, x, labels):
        m = torch.arange(12) >= 10
        return nn.functional.cross_entropy(self.head(x).masked_fill(m, -1e4), labels)

def model():
    return Masked()

def batch():
    return {"x": torch.randn(8, 8), "labels": torch.randint(10, (8,))}
"""


def test_a_constant_may_have_its_region_s_name(tmp_path: Path) -> None:
    """A region is named after the file, here as the mask is: a stage keeps both."""
    (tmp_path / "m.py").write_text(CLASHING)
    result = partc.compile(str(tmp_path / "m.py"), mesh="tp=2", precision="fp64").verify()
    assert result.ok, result.worst


if __name__ == "__main__":
    for name in SHOWN:
        shutil.rmtree(EXAMPLES / name, ignore_errors=True)
        for path, text in shown(name).items():
            (EXAMPLES / name / path).parent.mkdir(parents=True, exist_ok=True)
            (EXAMPLES / name / path).write_text(text)
