"""Memory formulas against published ones, against their programs, and at other sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sympy import Expr, Integer, symbols

from partc.api import compilation
from partc.communication.descriptions import moved_bytes
from partc.compilation.options import Options
from partc.cost.formulas import Formulas, formulas
from partc.cost.formulas.symbols import Sizes
from partc.cost.saved_tensors import held_inputs, most_saved, saved_bytes
from partc.errors import PartcError
from partc.ir.program import Program
from partc.rehearsal.rehearsal import rehearse
from partc.reports.formula_table import document, factored_text, page
from tests.zoo import MODELS

MEGATRON = str(Path(__file__).parents[1] / "models" / "megatron.py")
b, s, h, a, tp = symbols("b s h a tp", positive=True, integer=True)
SCORES = "matmul,mul,masked_fill,softmax,rand_like,ge,div"
Maker = Callable[..., Program]


def compiled(model: str, sizes: Mapping[str, Any] | None = None, **options: Any) -> Program:
    wanted = {"mesh": "1x1x2", "microbatches": 1, "schedule": "1f1b", "precision": "fp32", "seed": 0, "shard": ()}
    return compilation(model, None, Options.checked(**wanted | options), model_options=dict(sizes or {})).program


def block(**options: Any) -> Expr:
    """The saved values of a block of the published kind, without the norms' two numbers per row."""
    sizes = options.pop("sizes", {})
    found = formulas(compiled(MEGATRON, sizes, precision="bf16", casts=("softmax=bf16",), **options))
    region = next(item for item in found.regions if item.name == "block")
    kept = [term for term in region.saved if not term.name.endswith(("_mean", "_rstd"))]
    assert len(region.saved) - len(kept) in (0, 4)
    return found.in_proportion(sum(term.bytes for term in kept)).expand()


REPLICATED = ("*.x*=[_, _, _]", "*.d1_keep=[_, _, _]", "*.d2_keep=[_, _, _]", "*.proj.weight=[_, @tp]")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "published"),
    [
        # Korthikanti et al. 2022, equation 1
        ({"mesh": "1"}, s * b * h * (34 + 5 * a * s / h)),
        # With F.dropout, attention as it is written out is one operation, which saves a number a row for its scores
        ({"mesh": "1", "sizes": {"keep": False}}, s * b * h * 34 + 4 * a * b * s),
        # Equation 2: norms and dropouts of the residual stream on every rank
        ({"shard": REPLICATED}, s * b * h * (10 + 24 / tp + 5 * a * s / (h * tp))),
        # Equation 4: with sequence parallelism; what norms give is gathered again
        ({"recompute": "all_gather"}, s * b * h / tp * (34 + 5 * a * s / h)),
        # Equation 6, which keeps the scores' product with the values; it is made again here, like the scores
        ({"recompute": f"{SCORES},all_gather"}, s * b * h / tp * 34 - 2 * s * b * h / tp),
        # And with attention that saves a number a row in place of scores
        (
            {"recompute": "all_gather", "sizes": {"fused": True}},
            s * b * h / tp * 34 + 4 * a * b * s / tp,
        ),
        # Full recomputation: what a block is given
        ({"recompute": "full"}, 2 * s * b * h / tp),
    ],
    ids=["one device", "dropouts", "tensor", "sequence", "selective", "fused", "full"],
)
def test_published_formulas(options: dict[str, Any], published: Expr) -> None:
    assert (block(**options) - published).expand() == 0


def test_what_partc_saves_less_than_published() -> None:
    """`selective` makes norms and activations again too, and what norms give is gathered again."""
    large = {"h": 4096, "a": 32, "s": 2048, "b": 4}
    assert (block(mesh="1x1x8", recompute="selective", sizes=large) - s * b * h / tp * 22).expand() == 0


def check_at_home(program: Program, found: Formulas) -> None:
    held = held_inputs(program)
    for region in found.regions:
        assert found.at(region.saved_bytes) == saved_bytes(
            program.region(region.name), held[region.name], program.sizes
        )
    assert tuple(found.at(rank.saved) for rank in found.ranks) == most_saved(program)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2_dropout", "resnet", "mixtral", "skips"])
def test_formulas_have_the_bytes_of_the_program_they_are_of(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    program = compiled(
        model.source(tmp_path), model.options, mesh="2x2x2", microbatches=4, zero=1, recompute="selective"
    )
    check_at_home(program, formulas(program))


def test_traffic_is_that_of_the_account() -> None:
    program = compiled(MEGATRON, mesh="1x1x4")
    found = formulas(program)
    for region in found.regions:
        graphs = program.region(region.name).graphs
        for part, graph in zip(region.passes, graphs, strict=True):
            types = {value.name: value.type for value in program.region(region.name).params}
            types |= {name: value.type for name, value in graph.definitions().items()}
            moved = sum(moved_bytes(op, types, program.sizes) for op in graph.ops)
            assert found.at(part.moved.get("tp", Integer(0))) == moved


@pytest.mark.sampled
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", ["4", "1x2x2"])
def test_what_lasts_is_what_the_rehearsal_finds(zero: int, mesh: str) -> None:
    program = compiled(MEGATRON, mesh=mesh, zero=zero)
    found = formulas(program)
    (rank,) = found.ranks
    holds = {name: 0 for name in ("parameters", "optimizer")} | dict(rehearse(program).worst.categories)
    assert found.at(rank.parameters) == holds["parameters"]
    counters = holds["optimizer"] - found.at(rank.optimizer)
    assert 0 <= counters <= 8 * len(program.parameters)  # AdamW counts each parameter's steps


def same_elsewhere(one: Program, two: Program) -> None:
    """The formulas of one program, with the sizes of another, are those of the other."""
    here, there = formulas(one), formulas(two)
    sizes = {named.name: named.value for named in there.names}
    check_at_home(two, there)
    for left, right in zip(here.regions, there.regions, strict=True):
        assert here.at(left.saved_bytes, **sizes) == there.at(right.saved_bytes), left.name
        assert here.at(left.parameters, **sizes) == there.at(right.parameters), left.name
        for before, after in zip(left.passes, right.passes, strict=True):
            assert here.at(before.flops, **sizes) == there.at(after.flops), (left.name, before.name)
            assert {axis: here.at(moved, **sizes) for axis, moved in before.moved.items()} == {
                axis: there.at(moved) for axis, moved in after.moved.items()
            }, (left.name, before.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "one", "two"),
    [
        ("gpt", {}, {"batch": 8, "seq": 24}),
        ("llama", {"batch": 16, "seq": 24}, {"batch": 8, "seq": 20}),
        pytest.param("gemma", {"batch": 16, "seq": 24}, {"batch": 8, "seq": 20}, marks=pytest.mark.matrix),
        pytest.param("gpt_neox", {"batch": 16, "seq": 24}, {"batch": 8, "seq": 20}, marks=pytest.mark.matrix),
        ("t5_dropout", {"batch": 16, "seq": 24}, {"batch": 8, "seq": 20}),
        pytest.param("bert", {"batch": 16, "seq": 24}, {"batch": 8, "seq": 20}, marks=pytest.mark.matrix),
        ("vit", {"batch": 16}, {"batch": 8}),
    ],
)
def test_formulas_hold_at_other_sizes(name: str, one: dict[str, Any], two: dict[str, Any], tmp_path: Path) -> None:
    source = MODELS[name].source(tmp_path)
    plan = {"mesh": "1x2x2", "microbatches": 2}
    same_elsewhere(compiled(source, one, **plan), compiled(source, two, **plan))


@pytest.mark.sampled
@pytest.mark.parametrize("axes", ["1x2x2", "1x2x4"])
def test_formulas_hold_at_other_widths(axes: str) -> None:
    wide = {"b": 24, "s": 48, "h": 96, "a": 8, "v": 128}
    same_elsewhere(
        compiled(MEGATRON, mesh="1x2x2", microbatches=2), compiled(MEGATRON, wide, mesh=axes, microbatches=2)
    )


def test_flops_of_a_block_are_the_published_ones() -> None:
    """24 b s h² (1 + s / 6h) forward, twice that backward (Narayanan et al. 2021, appendix)."""
    found = formulas(compiled(MEGATRON, mesh="1"))
    forward, backward = (found.in_proportion(part.flops) for part in found.regions[-2].passes)
    assert (forward - 24 * b * s * h**2 * (1 + s / (6 * h))).expand() == 0
    assert (backward - 2 * forward).expand() == 0


@given(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=2, max_size=5))
def test_equal_products_keep_their_value(shapes: list[list[int]]) -> None:
    sizes = Sizes()
    total = math.prod(shapes[0])
    rows = [[sizes.new(value) for value in shape] for shape in shapes if math.prod(shape) == total]
    for row in rows[1:]:
        sizes.equate(rows[0], row)
    for row in rows:
        assert math.prod(sizes.value[size] for size in sizes.parts(row)) == total


def test_views_cut_sizes_into_what_they_are_made_of() -> None:
    sizes = Sizes()
    x, heads, width, again = sizes.new(64), sizes.new(4), sizes.new(16), sizes.new(64)
    sizes.equate([x], [heads, width])
    assert sizes.parts([x]) == (heads, width)
    sizes.equate([again], [x])
    assert sizes.parts([again]) == (heads, width)
    other = sizes.new(16)
    assert sizes.parts([other]) == (other,)  # as large, and nothing to do with it


def test_the_page_reads_as_the_field_writes() -> None:
    found = formulas(compiled(MEGATRON, precision="bf16", casts=("softmax=bf16",), recompute="all_gather"))
    text = page(found, region="block")
    assert "b·s·h·(34 + 5·a·s/h + 16/h)/tp" in text
    assert "2·a·b·s²/tp each" in text
    assert "8·b·s·h·(tp - 1)/tp" in text
    assert "size of a head; h/a in this model" in text
    assert factored_text(found, 3 * b) == "3·b"
    entry = json.loads(json.dumps(document(found)))["regions"]["block"]["saved"]
    assert Formulas.at(found, found.regions[1].saved_bytes) == entry["value"]


def test_a_region_that_is_not_there() -> None:
    with pytest.raises(PartcError, match="no region is called 'heads'") as caught:
        page(formulas(compiled(MEGATRON)), region="heads")
    assert caught.value.code == "P0605"
