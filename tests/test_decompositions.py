"""Decompositions, matrix functions, weight norms and three-dimensional pools are cut along the batch."""

from __future__ import annotations

from pathlib import Path

import pytest

import partc

MODEL = str(Path(__file__).parent / "models" / "decompositions.py")


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,tp=2"])
def test_examples_have_decompositions_of_their_own(mesh: str) -> None:
    package = partc.compile(MODEL, mesh=mesh, microbatches=2, precision="fp64")
    assert not package.warnings
    assert not package.replicated_ops
    result = package.verify(steps=2)
    assert result.ok, result.worst
