"""The axis ep: experts are cut over ranks, and their rows travel."""

from __future__ import annotations

import pytest

from partc.errors import PartcError
from partc.ir.mesh import Mesh


def test_experts_take_neighbours_of_an_axis() -> None:
    assert str(Mesh.parse("pp=2,dp=8,tp=2").with_experts("ep=4@dp")) == "pp=2,dp=2,ep=4,tp=2"
    assert str(Mesh.parse("dp_out=2,dp_in=4").with_experts("ep=2@dp_in")) == "dp_out=2,dp_in=2,ep=2"
    assert Mesh.parse("ep=4,tp=2,pp=2").expert_axes == ("ep",)
    assert Mesh.parse("ep=1,dp=2").expert_axes == ()


@pytest.mark.parametrize(
    ("mesh", "spec", "cause"),
    [
        ("dp=8", "4@dp", "does not parse"),
        ("dp=8", "ep=3@dp", "does not divide dp=8"),
        ("dp=8", "ep=0@dp", "does not divide dp=8"),
        ("dp=4,tp=2", "ep=2@tp", "no axis of the batch"),
        ("dp=4", "ep=2@dp_in", "no axis of the batch"),
        ("dp=4,ep=2", "ep=2@dp", "on top of ep=2"),
    ],
)
def test_experts_over_other_ranks_are_refused(mesh: str, spec: str, cause: str) -> None:
    with pytest.raises(PartcError, match=cause) as caught:
        Mesh.parse(mesh).with_experts(spec)
    assert caught.value.code == "P0106"
