"""Packages of one small model on several meshes and their training, shared by the tests of checkpoints."""

from __future__ import annotations

import importlib
import io
import json
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import partc
from partc import runtime
from partc.ir.mesh import Mesh
from partc.package.launch import local_environment, read_package
from partc.runtime.checkpoint.manifest import read
from partc.runtime.checkpoint.restore import Checkpoint
from partc.runtime.checkpoint.safetensors import load
from partc.runtime.train.train import main
from tests.prefork import shared

TIED = Path(__file__).parent / "models" / "tied.py"


def build(folder: Path, mesh: str, **options: Any) -> Path:
    """The package of tests/models/tied.py on a mesh; `2x2x2 zero 3` with its optimizer in parts."""
    target = folder / mesh.replace(",", "_")
    if not target.exists():
        mesh, _, level = mesh.partition(" zero ")
        given: dict[str, Any] = {"microbatches": 2, "precision": "fp64", "zero": level or 0, **options}
        partc.compile(TIED, mesh=mesh, **given).write(target)
    return target


def train(package: Path, *arguments: object, real: bool = False) -> subprocess.CompletedProcess[str]:
    """Run train.py: on forked processes, or on virtual ranks in this one, without starting Python and torch anew."""
    given = list(map(str, arguments))
    if real:
        with tempfile.TemporaryDirectory(prefix="partc-train-") as folder:
            size, output = Mesh.parse(read_package(package)["mesh"]).size, Path(folder) / "output"
            code = shared().ranks(size, [str(package / "train.py"), *given], output, local_environment()).wait()
            return subprocess.CompletedProcess(given, code, "", output.read_text())
    with imported_from(package), redirect_stderr(io.StringIO()) as said:
        code = main(["--virtual", *given], package)
    return subprocess.CompletedProcess(given, code, "", said.getvalue())


@contextmanager
def imported_from(package: Path) -> Iterator[None]:
    """`ranks` and `stages` are this package's; its runtime is the one under test."""
    before, path = set(sys.modules), list(sys.path)
    for found in pkgutil.walk_packages(runtime.__path__, "partc.runtime."):
        importlib.import_module(found.name)
    for name in [name for name in sys.modules if name.startswith("partc.runtime")]:
        sys.modules[name.removeprefix("partc.")] = sys.modules[name]
    sys.path.insert(0, str(package))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in (
                "ranks",
                "stages",
                "regions",
                "kernels",
                "runtime",
                "evaluation",
                "partc_model_file",
            ):
                del sys.modules[name]


def trained(package: Path, *arguments: object, real: bool = False) -> str:
    """The same where it must go well; returns what it printed."""
    done = train(package, *arguments, real=real)
    assert done.returncode == 0, done.stderr
    return done.stderr


def losses(metrics: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def whole(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, put together."""
    opened = Checkpoint(checkpoint, read(checkpoint))
    return {name: opened.whole(name) for name in opened.tensors}


def same_records(left: Path, right: Path, step: int) -> None:
    """Parameters and gradients of every rank after a step, counted from 0, are equal bit by bit."""
    names = sorted(path.name for path in left.glob(f"step_{step + 1:04d}_*"))
    assert names == sorted(path.name for path in right.glob(f"step_{step + 1:04d}_*")) != []
    for name in names:
        mine, theirs = load(left / name)[0], load(right / name)[0]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), name
