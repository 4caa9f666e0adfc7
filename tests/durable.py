"""Packages of one small model on several meshes, and their training: what the tests of checkpoints share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import partc
from partc.launch import local_environment, torchrun_command
from partc.runtime.manifest import read
from partc.runtime.restore import Checkpoint
from partc.runtime.tensors import load

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
    """Run train.py, on virtual ranks or on processes."""
    given = list(map(str, arguments))
    command = (
        torchrun_command(package, given) if real else [sys.executable, str(package / "train.py"), "--virtual", *given]
    )
    return subprocess.run(command, env=local_environment(), capture_output=True, text=True, timeout=120)


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
    """Parameters and gradients of every rank after a step are equal, bit by bit."""
    names = sorted(path.name for path in left.glob(f"step_{step:04d}_*"))
    assert names == sorted(path.name for path in right.glob(f"step_{step:04d}_*")) != []
    for name in names:
        mine, theirs = load(left / name)[0], load(right / name)[0]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), name
