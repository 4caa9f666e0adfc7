"""Experts that no token chooses are not computed where their results are multiplied by zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import partc
from partc.api import compilation
from partc.compilation.options import Options
from partc.ir.program import Program

CHOSEN = Path(__file__).parents[1] / "models" / "chosen.py"
TOKENS, EXPERTS = 48, 6
EVERY = (
    "threshold", "straight", "averaged", "competing", "shifted", "by_expert", "twice", "dropped", "most", "undefined",
    "infinite", "steered", "sliced",
)  # fmt: skip


def rows(program: Program) -> set[int]:
    """The numbers of rows that products by expert have, over all ranks."""
    ops = (op for region in program.regions for op in region.forward.ops)
    return {op.result.type.shape[0] for op in ops if op.name == "expert_matmul"}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("style", "choices", "mesh", "how"),
    [
        ("scatter", 2, "dp=2,ep=2", {"zero": 1}),
        ("below", 2, "dp=2,tp=2", {"zero": 3}),
        ("below", 2, "dp=2,ep=2", {}),
        ("added", 2, "cp=2,dp=2", {}),
        ("one_hot", 2, "pp=2,dp=2", {"microbatches": 2}),
        ("masked", 2, "ep=2,tp=2", {"recompute": "full"}),
        ("where", 2, "dp=2", {}),
        ("repeated", 1, "ep=2,tp=2", {"zero": 2}),
        ("repeated", 1, "dp=2,tp=2", {}),
        ("scaled", 2, "ep=2,cp=2", {}),
        ("gathered", 2, "dp=2,ep=2", {"microbatches": 2}),
        ("switch", 1, "ep=2", {}),
        ("matched", 2, "dp=2,ep=2", {"recompute": "selective"}),
        ("larger", 2, "dp=2,tp=2", {}),
    ],
)
def test_only_chosen_rows_are_computed(
    style: str, choices: int, mesh: str, how: dict[str, Any], tmp_path: Path
) -> None:
    package = partc.compile(CHOSEN, mesh=mesh, precision="fp64", options={"style": style}, **how)
    assert rows(package.program) == {TOKENS * choices}
    found = package.verify(steps=2)
    assert found.ok and found.worst.rel_err < 1e-10, found.worst


@pytest.mark.parametrize("style", EVERY)
def test_every_row_is_computed_where_it_counts(style: str) -> None:
    """Without the axis ep such models stay as they are."""
    done = compilation(CHOSEN, None, Options.checked(mesh="dp=2"), model_options={"style": style}, until="dense")
    assert not rows(done.after("dense"))


@pytest.mark.sampled
@pytest.mark.parametrize("style", ["straight", "averaged", "shifted", "by_expert", "twice", "infinite", "steered"])
def test_every_row_travels_where_it_counts(style: str) -> None:
    package = partc.compile(CHOSEN, mesh="dp=2,ep=2", precision="fp64", options={"style": style})
    assert rows(package.program) == {TOKENS * EXPERTS}
    found = package.verify(steps=2)
    assert found.ok and found.worst.rel_err < 1e-10, found.worst


def test_rows_of_experts_with_biases_travel_in_16_bits() -> None:
    package = partc.compile(CHOSEN, mesh="ep=2", precision="bf16", options={"style": "below"})
    ops = (op for region in package.program.regions for op in region.forward.ops)
    assert {op.result.type.dtype for op in ops if op.name in ("dispatch", "combine")} == {"bf16"}
