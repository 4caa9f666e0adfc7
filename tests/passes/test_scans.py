"""Loops over time as scans: found, cut, differentiated and emitted, against eager torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partc
from partc import passes
from partc.frontend.trace import trace_model
from partc.ir.interpreter import evaluate_program
from partc.ir.mesh import Mesh
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.ir.program import SCAN, Op, Program
from partc.ir.scans import scan_of
from tests.models.loops import LOOPS, B, D, Loop, T, of_growing_parts, shared


def program(run: Callable[[Any, Tensor], Tensor], mesh: str = "1", microbatches: int = 1) -> Program:
    return trace_model(
        lambda: Loop(run),
        lambda: {"x": torch.randn(B, T, D)},
        lambda model, batch: (model(batch["x"]) ** 2).mean(),
        name="loop",
        mesh=Mesh.parse(mesh),
        precision="fp64",
    ).program


def scans(program: Program) -> list[Op]:
    return [op for region in program.regions for op in region.forward.ops if op.name == SCAN]


@pytest.mark.parametrize("run", LOOPS, ids=lambda run: run.__name__)
def test_a_scan_computes_what_the_loop_computes(run: Callable[[Any, Tensor], Tensor]) -> None:
    traced = program(run)
    steps = passes.run(traced, {}, until="scan")
    found = steps[-1].program
    (op,) = scans(found)
    assert scan_of(op).length in (T, T - 1, T // 2 - 1)
    outside = sum(len(region.forward.ops) for region in found.regions)
    assert outside + len(scan_of(op).step.ops) < 90
    assert parse(print_program(found)) == found or "at " in print_program(found, sources=True)
    torch.manual_seed(1)
    model = Loop(run).double()
    batch = {"x": torch.randn(B, T, D, dtype=torch.float64)}
    values = {**dict(model.named_parameters())}
    wanted = (model(batch["x"]) ** 2).mean()
    made = evaluate_program(found, batch, values)
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("run", [shared, of_growing_parts], ids=lambda run: run.__name__)
def test_other_loops_stay(run: Callable[[Any, Tensor], Tensor]) -> None:
    assert not scans(passes.run(program(run), {}, until="scan")[-1].program)


LOOPS_FILE = Path(__file__).parents[1] / "models" / "loops.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "mesh", "microbatches"),
    [
        ("written", "dp=2,tp=2", 1),
        ("cells", "pp=2,tp=2", 2),
        ("chunks", "pp=2,tp=2", 2),
        pytest.param("written", "pp=2,tp=2", 2, marks=pytest.mark.matrix),
        pytest.param("cells", "dp=2,tp=2", 1, marks=pytest.mark.matrix),
        pytest.param("chunks", "dp=2,tp=2", 1, marks=pytest.mark.matrix),
    ],
)
def test_a_package_equals_the_single_device(loop: str, mesh: str, microbatches: int) -> None:
    """On meshes that cut the batch, channels and time's microbatches."""
    options = {"loop": loop, "batch": 8, "depth": 2}
    package = partc.compile(str(LOOPS_FILE), mesh=mesh, microbatches=microbatches, options=options, precision="fp64")
    result = package.verify(steps=2)
    assert result.ok, result
    assert result.worst is not None and result.worst.rel_err < 1e-11
