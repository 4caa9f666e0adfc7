"""Decompositions, matrix functions, weight norms and three-dimensional pools are cut along the batch."""

from __future__ import annotations

from pathlib import Path

import pytest

import partc
from partc.cluster.cluster import preset
from partc.compilation.plan import ParallelPlan
from partc.compilation.simulation import Simulator
from partc.cost.calibration import calibration
from partc.passes.differentiate.recorder import Recorder

MODEL = str(Path(__file__).parents[1] / "models" / "decompositions.py")


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,tp=2"])
def test_examples_have_decompositions_of_their_own(mesh: str) -> None:
    package = partc.compile(MODEL, mesh=mesh, microbatches=2, precision="fp64")
    assert not package.warnings
    assert not package.replicated_ops
    result = package.verify(steps=2)
    assert result.ok, result.worst


@pytest.mark.parametrize("model", [MODEL, str(Path(__file__).parents[2] / "examples" / "mlp.py")])
def test_derivatives_are_the_same_in_either_trace(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight norms have a derivative that works in place, which only AOT autograd makes functional."""
    simulator = Simulator(model, preset("4xCPU"), calibration(preset("4xCPU")))
    plan = ParallelPlan(mesh="dp=2,tp=2", precision="fp32", kernels="aten")
    _, once = simulator.differentiated(plan)
    monkeypatch.setattr(Recorder, "changes_operands", property(lambda _: True, lambda *_: None), raising=False)
    _, functional = Simulator(model, simulator.cluster, simulator.rates.constants).differentiated(plan)
    assert once == functional
    assert not any(op.name.endswith("_") for region in once.regions for graph in region.graphs for op in graph.ops)
