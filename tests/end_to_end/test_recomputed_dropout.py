"""A checkpoint of the model's own that restores the state of torch's generator draws the same masks once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc import passes
from partc.frontend.trace import trace_model
from partc.ir.mesh import Mesh
from tests.independent.plain import Recipe, train
from tests.independent.trainings import ALLOWED, differences, packaged
from tests.prefork import shared

MODEL = Path(__file__).parents[1] / "models" / "recomputed_dropout.py"


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=2", {}),
        pytest.param("pp=2,tp=2", {"microbatches": 2, "recompute": "full"}, marks=pytest.mark.slow),
        pytest.param("dp=2", {"zero": 3, "microbatches": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_with_dropout_trains_like_the_model_without(
    mesh: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The plain loop runs without the checkpoint, so that it draws each mask once."""
    package = partc.compile(str(MODEL), mesh=mesh, precision="fp64", options={"checkpointed": True}, **options)
    recipe = Recipe(weight_decay=0.1, clip=0.5)
    found = packaged(package.write(tmp_path / "build"), recipe, tmp_path, shared())
    where, error = max(differences(found, train(MODEL, recipe)), key=lambda item: item[1])
    assert error <= ALLOWED, where


class Twice(nn.Module):
    """Two dropouts with one mask, and one with another."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(4, 64), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x) + 4
        state = torch.get_rng_state()
        first = self.drop(h)
        torch.set_rng_state(state)
        again, other = self.drop(h), self.drop(h)
        return (first - again).abs().sum() + ((first - other).abs().sum() == 0)


def test_a_state_that_forward_has_read_gives_the_same_mask() -> None:
    batch = {"x": torch.randn(8, 4)}
    program = trace_model(Twice, lambda: batch, name="m", mesh=Mesh.parse("1")).program
    (region,) = passes.run(program, {}, until="normalize")[-1].program.regions
    assert [op.args[-1] for op in region.forward.ops if op.name == "dropout"] == [0, 0, 1]
