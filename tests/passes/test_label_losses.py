"""Losses written with log-probabilities become losses of logits, in all usual spellings."""

from __future__ import annotations

from pathlib import Path

import pytest

import partc
from partc.ir.program import Program

MODEL = Path(__file__).parents[1] / "models" / "label_losses.py"


WHOLE = ["picked", "picked_in_the_middle", "focal", "of_negatives", "of_images", "smoothed"]


def compiled(kind: str, mesh: str, **options: object) -> partc.Package:
    return partc.compile(MODEL, mesh=mesh, options={"kind": kind}, **options)  # type: ignore[arg-type]


def names(program: Program) -> set[str]:
    inner = (
        step for region in program.regions for graph in region.graphs for op in graph.ops for step in (op, *op.body)
    )
    return {op.name for op in inner}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize(("mesh", "kernels"), [("2", "aten"), pytest.param("1x2", "triton", marks=pytest.mark.slow)])
def test_labels_of_log_probabilities_are_losses_of_logits(kind: str, mesh: str, kernels: str) -> None:
    package = compiled(kind, mesh, precision="fp64", kernels=kernels)
    assert names(package.program).isdisjoint({"gather", "scatter_add", "log_softmax", "_log_softmax_backward_data"})
    result = package.verify(steps=1)
    assert result.ok, result.worst


@pytest.mark.parametrize("kind", ["entropy", "several"])
@pytest.mark.parametrize("kernels", ["aten", "triton"])
def test_other_readers_keep_log_probabilities(kind: str, kernels: str) -> None:
    package = compiled(kind, "2", precision="fp64", kernels=kernels)
    assert "exp" in names(package.program) or "gather" in names(package.program)
    result = package.verify(steps=1)
    assert result.ok, result.worst


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["z_loss", "z_loss_first", "distilled"])
@pytest.mark.parametrize("most", [4, 16384])
def test_softmaxes_and_log_sum_exps_are_kernels_of_rows_of_any_length(
    kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the logits in few bits alone: neither they nor a gradient of theirs is made in fp32."""
    for module in ("iteration_spaces", "cross_entropy"):
        monkeypatch.setattr(f"partc.passes.fuse.{module}.MOST_COLUMNS", most)
    for precision in ("fp64", "bf16"):
        package = compiled(kind, "1", precision=precision, kernels="triton")
        made = {op.name for region in package.program.regions for graph in region.graphs for op in graph.ops}
        assert made.isdisjoint({"logsumexp", "softmax", "log_softmax", "_log_softmax_backward_data"})
        result = package.verify(steps=1)
        assert result.ok, result.worst
    if kind != "distilled":
        logits = (8, 3, 11)
        graphs = [graph for region in package.program.regions for graph in region.graphs]
        whole = [v.type for graph in graphs for v in graph.definitions().values() if v.type.shape == logits]
        assert whole and {type.dtype for type in whole} == {"bf16"}


GIVEN = """
import torch
import torch.nn.functional as F
from torch import nn


def model():
    return nn.Linear(6, 5)


def batch():
    return {"x": torch.randn(8, 3, 6), "y": torch.randint(0, 5, (8, 3)), "weight": torch.rand(5)}


def loss(model, batch):
    x, y = model(batch["x"]), batch["y"]
    p = F.logsigmoid(x)
    return (
        F.nll_loss(p.flatten(0, 1), y.flatten(), ignore_index=2)
        + 0.1 * F.nll_loss(p.transpose(1, 2), y, reduction="sum", weight=batch["weight"])
        + F.nll_loss(p.transpose(1, 2), y, weight=torch.arange(5.0) + 1, ignore_index=1)
        + F.nll_loss(F.log_softmax(x, -1).transpose(1, 2), y, reduction="none").square().mean()
        + F.nll_loss((x.softmax(-1) + 1e-3).log().flatten(0, 1), y.flatten())
        + F.nll_loss(F.log_softmax(x, 1).flatten(0, 1), y.flatten())
    )
"""


def test_losses_of_values_that_are_no_log_softmax_are_no_cross_entropies(tmp_path: Path) -> None:
    (tmp_path / "given.py").write_text(GIVEN)
    package = partc.compile(tmp_path / "given.py", mesh="dp=2", microbatches=2, precision="fp64")
    ops = [op.name for region in package.program.regions for op in region.forward.ops]
    assert ops.count("cross_entropy") == 1
    found = package.verify(steps=1)
    assert found.ok and found.worst.rel_err < 1e-12
