"""Round trips through fp32: the program's text, and the casts that stay."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from partc.ir.printer import print_region
from partc.ir.verifier import verify_program
from partc.passes.narrow import narrow
from tests.programs import fused_graph

BODY = """
  forward:
    input x: bf16[8, 4]
    wide = to(x, <f32>)  # f32[8, 4]
    rows = reshape(wide, (2, 4, 4))  # f32[2, 4, 4]
    turned = permute(rows, (1, 0, 2))  # f32[4, 2, 4]
    low = to(turned, <bf16>)  # bf16[4, 2, 4]
    again = to(wide, <bf16>)  # bf16[8, 4]
    y = relu(low)  # bf16[4, 2, 4]
    z = mul(again, x)  # bf16[8, 4]
    first = sum(y, (0, 1, 2), dtype=<f32>)  # f32[]
    second = sum(z, (0, 1), dtype=<f32>)  # f32[]
    loss = add(first, second)  # f32[]
    return loss
"""


def test_views_are_taken_of_the_16_bit_value_itself() -> None:
    done = narrow(fused_graph(BODY))
    verify_program(done, frozenset({"plain"}), "narrow")
    assert_expected_inline(
        print_region(done.regions[0]),
        """\
region main phase microbatch:
  forward:
    input x: bf16[8, 4]
    rows_narrow = reshape(x, (2, 4, 4))            # bf16[2, 4, 4]
    low         = permute(rows_narrow, (1, 0, 2))  # bf16[4, 2, 4]
    y           = relu(low)                        # bf16[4, 2, 4]
    z           = mul(x, x)                        # bf16[8, 4]
    first       = sum(y, (0, 1, 2), dtype=<f32>)   # f32[]
    second      = sum(z, (0, 1), dtype=<f32>)      # f32[]
    loss        = add(first, second)               # f32[]
    return loss
""",
    )


def test_the_copy_stays_for_those_who_read_it_in_fp32() -> None:
    read = BODY.replace("first = sum(y, (0, 1, 2), dtype=<f32>)", "first = sum(rows, (0, 1, 2))")
    names = [op.name for op in narrow(fused_graph(read)).regions[0].forward.ops]
    assert names == ["to", "reshape", "reshape", "permute", "relu", "mul", "sum", "sum", "add"]


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("input x: bf16[8, 4]", "input x: f16[8, 4]"),  # another rounding
        ("wide = to(x, <f32>)", "wide = exp(x)"),
        ("rows = reshape(wide, (2, 4, 4))", "e = exp(wide)  # f32[8, 4]\n    rows = reshape(e, (2, 4, 4))"),
    ],
)
def test_other_casts_round(line: str, other: str) -> None:
    changed = BODY.replace(line, other)
    (kept,) = (op for op in narrow(fused_graph(changed)).regions[0].forward.ops if op.result.name == "low")
    assert kept.name == "to"


def test_a_result_keeps_its_name() -> None:
    region = narrow(fused_graph(BODY + "  saved again, x\n")).regions[0]
    (kept,) = (op for op in region.forward.ops if op.result.name == "again")
    assert kept.name == "to" and region.saved == ("again", "x")
