"""Fused projections of unequal widths: tp cuts each section, and nothing but the residual stream moves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import partc
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.ir.program import Program
from tests.models import fused


def _compiled(mesh: str, how: str = "split", *, precision: str = "fp64", **more: Any) -> partc.Package:
    torch.manual_seed(0)
    return partc.compile(fused.model(how), fused.batch(), mesh=mesh, precision=precision, **more)


def _ops(program: Program) -> Counter[str]:
    """The operations in the forward graph of a layer."""
    (block,) = (region for region in program.regions if len(program.calls_to(region.name)) == 2)
    return Counter(op.name for op in block.forward.ops)


def _orders(program: Program) -> dict[str, str]:
    """The orders of the first layer's parameters."""
    found = ((item.name.removeprefix("blocks.0.mix."), item.sectioned) for item in program.parameters)
    return {name: str(order) for name, order in found if order is not None and not name.startswith("blocks")}


@pytest.mark.parametrize("how", ["split", "slices", "twice"])
def test_each_rank_has_whole_heads(how: str) -> None:
    program = _compiled("tp=2", how).program
    assert _orders(program) == dict.fromkeys(("qkv.weight", "qkv.bias"), "0: 2 of 24+12+12")
    ops = _ops(program)
    assert ops["all_gather"] == ops["reduce_scatter"] == 1 and not ops["all_to_all"]


def test_sections_behind_a_convolution() -> None:
    program = _compiled("tp=2", "states").program
    inner = "0: 2 of 24+12+12"
    assert _orders(program) == {"qkv.weight": "0: 2 of 24+24+12+12+12", "conv.weight": inner, "conv.bias": inner}
    ops = _ops(program)
    assert ops["all_gather"] == ops["reduce_scatter"] == 1 and not ops["all_to_all"]


def test_one_head_for_all_queries_moves_alone() -> None:
    """Key and value become whole on every rank; the queries stay where they are."""
    program = _compiled("tp=2", "one head").program
    assert _orders(program) == dict.fromkeys(("qkv.weight", "qkv.bias"), "0: 2 of 24+2+2")
    assert _ops(program)["all_to_all"] == 2


@pytest.mark.parametrize("mesh", ["tp=5", "dp=2", "cp=2"])
def test_the_order_is_the_models_where_tp_does_not_divide(mesh: str) -> None:
    assert not _orders(_compiled(mesh).program)


def test_a_pinned_parameter_keeps_its_order() -> None:
    package = _compiled("tp=2", shard=["blocks.0.mix.qkv.weight=[4 * _@tp, _]"])
    assert not _orders(package.program)
    assert package.verify().ok


def test_a_parameter_that_others_read_keeps_its_order() -> None:
    package = _compiled("tp=2", "read elsewhere")
    assert not _orders(package.program)
    assert package.verify().ok


def test_a_parameter_of_two_layers_has_one_order() -> None:
    package = _compiled("tp=2", "tied")
    assert len(_orders(package.program)) == 2
    assert package.verify().ok


@pytest.mark.parametrize(
    ("how", "mesh", "more"),
    [
        ("slices", "dp=2,tp=2", {"zero": 3, "microbatches": 2, "recompute": "selective"}),
        ("twice", "pp=2,tp=3", {"microbatches": 2, "recompute": "full"}),
        ("one head", "cp=2,tp=2", {}),
        ("states", "dp=2,tp=3", {"zero": 1}),
        ("split", "tp=2", {"kernels": "triton"}),
        ("states", "tp=2", {"zero": 2, "batch_over": "tp=blocks.0"}),
    ],
)
def test_packages_train_like_one_device(how: str, mesh: str, more: dict[str, Any]) -> None:
    result = _compiled(mesh, how, **more).verify()
    assert result.ok, result.worst


def test_programs_are_read_as_they_are_printed() -> None:
    program = _compiled("tp=2").program
    assert parse(print_program(program)).parameters == program.parameters


def test_a_split_of_several_parts_on_a_rank_is_written_out() -> None:
    """The pin leaves all parts of the queries, keys and values on each rank, in the order in which they are stored."""
    package = _compiled("tp=2", shard=["block.mix_split_0=[_, _, _]"])
    assert _orders(package.program)
    assert _ops(package.program)["reshape"] > _ops(_compiled("tp=2").program)["reshape"]
    assert package.verify().ok
