"""Saved parts of a larger value: their copies free it, in models whose values come from the projection of queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import partc
from partc import fuel
from partc.api import compilation
from partc.compilation.options import Options
from partc.cost.saved_tensors import saved_bytes
from partc.ir.program import Program
from partc.passes import trim
from tests.models import fused


def _layer(program: Program) -> Any:
    (found,) = (region for region in program.regions if len(program.calls_to(region.name)) == 2)
    return found


def _copies(region: Any) -> int:
    return [op.name for op in region.forward.ops].count("clone")


@pytest.mark.parametrize("kernels", ["aten", "triton"])
@pytest.mark.parametrize("mesh", ["1", "tp=2"])
def test_queries_and_keys_are_freed(mesh: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank saves its part of the 12 columns of values, not of all 48."""
    ways, rows = (2 if mesh == "tp=2" else 1), 8 * 4096
    programs = []
    for least in (1 << 40, trim.LEAST):
        monkeypatch.setattr(trim, "LEAST", least)
        model, batch = fused.model("rotary"), fused.batch(4096)
        programs.append(partc.compile(model, batch, mesh=mesh, precision="fp32", kernels=kernels).program)
    before, after = programs
    saved = [saved_bytes(_layer(each), frozenset(), each.sizes) for each in programs]
    assert saved[0] - saved[1] == rows * (48 - 12) * 4 // ways
    assert (_copies(_layer(before)), _copies(_layer(after))) == (0, 1)


@pytest.mark.parametrize(("how", "seq"), [("split", 4096), ("rotary", 64)])
def test_whole_projections_and_small_ones_are_saved_as_they_are(how: str, seq: int) -> None:
    """Without rotary embeddings, attention saves queries and keys where they are."""
    assert not _copies(_layer(partc.compile(fused.model(how), fused.batch(seq), mesh="1").program))


@pytest.mark.parametrize("by", ["outputs", "saved"])
def test_a_value_that_stays_anyway_is_not_copied_in_part(by: str) -> None:
    """The layer returns the whole product, or saves it itself."""
    how = Options.checked(mesh="1", microbatches=1, schedule="1f1b", precision="fp32", seed=0, shard=())
    given = {"how": "rotary", "seq": 4096}
    program = compilation(str(fused.__file__), None, how, model_options=given, until="recompute").program
    layer = _layer(program)
    qkv = next(op for op in layer.forward.ops if op.name == "linear").result.name
    if by == "outputs":
        staying = replace(layer, forward=replace(layer.forward, outputs=(*layer.forward.outputs, qkv)))
    else:
        staying = replace(layer, saved=(*layer.saved, qkv))
    assert _copies(trim.trim(replace(program, regions=(layer,))).regions[0]) == 1
    assert trim.trim(replace(program, regions=(staying,))).regions == (staying,)


def test_fuel_stops_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuel, "may_rewrite", lambda name, source: name != "trim")
    assert not _copies(_layer(partc.compile(fused.model("rotary"), fused.batch(4096), mesh="1").program))


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("dp=2,tp=2", {"zero": 3}),
        ("pp=2,tp=2", {"microbatches": 4, "schedule": "zero-bubble"}),
        ("tp=2", {"kernels": "triton"}),
    ],
)
def test_packages_equal_the_single_device(mesh: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trim, "LEAST", 1)
    torch.manual_seed(0)
    package = partc.compile(fused.model("rotary"), fused.batch(), mesh=mesh, precision="fp64", **more)
    assert any(map(_copies, package.program.regions))
    found = package.verify(virtual=True, steps=2)
    assert found.ok and found.worst.rel_err < 1e-12
