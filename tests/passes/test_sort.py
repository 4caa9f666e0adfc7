"""Rows are sorted by expert once for all products of a layer, and only where each row surely has an expert."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

import partc
from partc.ir.expert_products import ExpertMatmul
from partc.ir.interpreter import results_of
from partc.ir.printer import print_region
from partc.ir.program import Program
from partc.passes.differentiate.products import with_cheaper_products
from partc.passes.sort import sort
from partc.passes.wide import wide
from partc.runtime.ops import experts
from tests.programs import fused_graph

MODELS = Path(__file__).parents[1] / "models"
BODY = """
  param up: f32[4, 6, 8@tp]
  param down: f32[4, 8@tp, 6]
  param bias: f32[4, 6]
  forward:
    input x: f32[12, 6]
    input scores: f32[12, 4]
    s, chosen = topk(scores, 1)  # f32[12, 1] ; i64[12, 1]
    own = reshape(chosen, (12,))  # i64[12]
    h = expert_matmul(x, own, up)  # f32[12, 8@tp]
    h_2 = gelu(h)  # f32[12, 8@tp]
    y = expert_matmul(h_2, own, down)  # f32[12, 6] partial(tp)
    y_2 = all_reduce(y, axis="tp")  # f32[12, 6]
    b = index(bias, (own,))  # f32[12, 6]
    z = add(y_2, b)  # f32[12, 6]
    loss = sum(z, (0, 1), False)  # f32[]
    return loss
"""


def names(program: Program) -> Counter[str]:
    return Counter(op.name for region in program.regions for op in region.forward.ops)


def test_collectives_and_biases_of_sorted_rows_stay_between() -> None:
    assert_expected_inline(
        print_region(sort(fused_graph(BODY)).regions[0]),
        """\
region main phase microbatch:
  param up: f32[4, 6, 8@tp]
  param down: f32[4, 8@tp, 6]
  param bias: f32[4, 6]
  forward:
    input x: f32[12, 6]
    input scores: f32[12, 4]
    s, chosen            = topk(scores, 1)                                   # f32[12, 1] ; i64[12, 1]
    own                  = reshape(chosen, (12,))                            # i64[12]
    order, places, own_2 = expert_order(own, 4)                              # i64[12] ; i64[12] ; i64[12]
    x_sorted             = permute_rows(x, order, places)                    # f32[12, 6]
    h                    = expert_matmul(x_sorted, own_2, up, ordered=True)  # f32[12, 8@tp]
    h_2                  = gelu(h)                                           # f32[12, 8@tp]
    y                    = expert_matmul(h_2, own_2, down, ordered=True)     # f32[12, 6] partial(tp)
    y_2                  = all_reduce(y, axis="tp")                          # f32[12, 6]
    b                    = expert_rows(own_2, bias)                          # f32[12, 6]
    z_sorted             = add(y_2, b)                                       # f32[12, 6]
    z                    = permute_rows(z_sorted, places, order)             # f32[12, 6]
    loss                 = sum(z, (0, 1), False)                             # f32[]
    return loss
""",
    )


@pytest.mark.parametrize(
    ("was", "now", "orders", "moves"),
    [
        ("", "", 1, 2),  # in and out once
        # Numbers up to 4, of an expert that does not exist
        ("own = reshape(chosen, (12,))", "own_1 = reshape(chosen, (12,))  # i64[12]\n    own = add(own_1, 1)", 0, 0),
        # Random numbers go by place
        ("h_2 = gelu(h)", "h_1, kept = dropout(h, 0.5, 2, 0)  # f32[12, 8@tp] ; bool[12, 8@tp]\n    h_2 = gelu(h_1)", 1, 4),
        # A mean over rows mixes them
        ("h_2 = gelu(h)", "m = mean(h, (0,), True)  # f32[1, 8@tp]\n    h_2 = sub(h, m)", 1, 3),
    ],
)  # fmt: skip
def test_rows_are_sorted_where_all_have_an_expert(was: str, now: str, orders: int, moves: int) -> None:
    found = names(sort(fused_graph(BODY.replace(was, now))))
    assert (found["expert_order"], found["permute_rows"]) == (orders, moves)


SQUARE = """
  param up: f32[4, 12, 12]
  param down: f32[4, 12, 12]
  param scale: f32[4]
  forward:
    input x: f32[12, 12]
    input scores: f32[12, 4]
    input others: f32[12, 4]
    own = argmax(scores, 1)  # i64[12]
    other = argmax(others, 1)  # i64[12]
    h = expert_matmul(x, own, up)  # f32[12, 12]
    BETWEEN
    y = expert_matmul(h_2, own, down)  # f32[12, 12]
    z = mul(y, x)  # f32[12, 12]
    loss = sum(z, (0, 1), False)  # f32[]
    return loss
"""


@pytest.mark.parametrize(
    ("between", "moves"),
    [
        # Rows that another operand reads as columns, or as a table, are needed in their own order too.
        ("h_1 = gelu(h)  # f32[12, 12]; h_2 = matmul(h, h_1)  # f32[12, 12]", 3),
        ("h_2 = matmul(h, h)  # f32[12, 12]", 3),
        ("h_1 = index(h, (own,))  # f32[12, 12]; h_2 = add(h, h_1)  # f32[12, 12]", 3),
        ("h_2 = add(h, own)  # f32[12, 12]", 2),
        # Rows of two choices have two orders, whichever product comes first.
        ("h_1 = expert_matmul(h, other, up)  # f32[12, 12]; h_2 = gelu(h_1)  # f32[12, 12]", 6),
        (
            "h_1 = expert_matmul(h, other, up)  # f32[12, 12]; h_3 = expert_matmul(h_1, own, up)  # f32[12, 12]; "
            "h_2 = expert_matmul(h_3, other, down)  # f32[12, 12]",
            10,
        ),
        # A number of each expert
        ("s = index(scale, (own,))  # f32[12]; s_1 = reshape(s, (12, 1))  # f32[12, 1]; h_2 = mul(h, s_1)", 2),
    ],
)
def test_sorted_rows_have_the_same_results(between: str, moves: int) -> None:
    lines = [line if "#" in line else f"{line}  # f32[12, 12]" for line in between.split("; ")]
    program = fused_graph(SQUARE.replace("BETWEEN", "\n    ".join(lines)))
    region, generator = program.regions[0], torch.Generator().manual_seed(3)
    given = {
        value.name: torch.randn(value.type.shape, generator=generator)
        for value in (*region.params, *region.forward.inputs)
    }
    after = sort(program)
    graph = after.regions[0].forward
    before, found = ({**given} for _ in range(2))
    for ops, values in ((region.forward.ops, before), (graph.ops, found)):
        for op in ops:
            values.update(results_of(op, values))
    torch.testing.assert_close(found["z"], before["z"])
    for op in graph.ops:
        if (product := ExpertMatmul.of(op)) is not None:
            assert dict(op.attrs)["ordered"] and found[product.chosen].equal(found[product.chosen].sort().values)
    assert names(after)["permute_rows"] == moves


@pytest.mark.parametrize(("mesh", "orders"), [("1", 1), ("dp=2,tp=2", 1), ("ep=2", 0)])
def test_rows_that_travel_are_in_order_already(mesh: str, orders: int) -> None:
    package = partc.compile(MODELS / "routed.py", mesh=mesh, precision="fp64")
    found = names(package.program)
    assert (found["expert_order"], found["permute_rows"]) == (orders, 2 * orders)
    assert package.verify(steps=2).ok


def test_rows_without_an_expert_are_not_sorted() -> None:
    package = partc.compile(MODELS / "routed.py", mesh="1", precision="fp64", expert_capacity="1.25@sequence")
    assert not names(package.program)["expert_order"]


def test_the_order_of_rows_and_its_inverse() -> None:
    chosen = torch.tensor([3, 0, 2, 0, 3, 1])
    order, places, own = experts.expert_order(chosen, 4)
    assert order.tolist() == [1, 3, 5, 2, 0, 4] and own.tolist() == [0, 0, 1, 2, 3, 3]
    assert places[order].tolist() == [*range(6)] and own.dtype == chosen.dtype


@pytest.mark.parametrize("kept", [False, True])
def test_wide_sums_read_their_narrow_operand(kept: bool) -> None:
    """Unless the wide copy is needed for more than the sum."""
    program = fused_graph(
        """
  forward:
    input x: bf16[8, 4, 2]
    x_wide = to(x, <f32>)  # f32[8, 4, 2]
    y = sum(x_wide, (1,), False)  # f32[8, 2]
    return y
"""
    )
    if kept:
        (region,) = program.regions
        program = replace(program, regions=(replace(region, forward=replace(region.forward, outputs=("y", "x_wide"))),))
    text = print_region(wide(program).regions[0])
    assert ("sum(x, (1,), False, dtype=<f32>)" in text) is not kept and ("to(x" in text) is kept


def test_sums_over_no_dimension_keep_their_cast() -> None:
    program = fused_graph(
        """
  forward:
    input x: bf16[8, 2]
    x_wide = to(x, <f32>)  # f32[8, 2]
    y = sum(x_wide, (), False)  # f32[8, 2]
    return y
"""
    )
    assert wide(program) == program


@pytest.mark.parametrize(("casts", "copied"), [((), False), (("f32",), False), (("f32", "bf16"), True)])
def test_copies_of_rows_are_read_as_one(casts: tuple[str, ...], copied: bool) -> None:
    """One cast of the copies moves to the originals. Copies with two casts stay, as one cast would round differently."""
    lines = "\n    ".join(f"c_{i + 1} = to(c_{i}, <{dtype}>)  # {dtype}[6, 2, 4]" for i, dtype in enumerate(casts))
    dtype = casts[-1] if casts else "bf16"
    program = fused_graph(
        f"""
  forward:
    input x: bf16[6, 4]
    input order: i64[12]
    input places: i64[12]
    single = reshape(x, (6, 1, 4))  # bf16[6, 1, 4]
    c_0 = expand(single, (6, 2, 4))  # bf16[6, 2, 4]
    {lines}
    rows = reshape(c_{len(casts)}, (12, 4))  # {dtype}[12, 4]
    y = permute_rows(rows, order, places)  # {dtype}[12, 4]
    return y
"""
    )
    ops = program.regions[0].forward.ops
    *_, moved = with_cheaper_products(ops, lambda stem: stem)
    assert (moved == ops[-1]) is copied and (moved.args[3:] == (2,)) is not copied
