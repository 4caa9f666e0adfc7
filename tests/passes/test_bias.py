"""Products with a bias: the program's text, and the cases that stay separate."""

from __future__ import annotations

import re

import pytest
from expecttest import assert_expected_inline

from partc.ir.printer import print_region
from partc.ir.verifier import verify_program
from partc.passes.bias import bias
from partc.passes.differentiate import differentiate
from tests.programs import fused_graph

BODY = """
  param w: f32[4, 6@tp]
  param b: f32[6@tp]
  param c: f32[4]
  forward:
    input x: f32[8, 2, 4]
    h = matmul(x, w)  # f32[8, 2, 6@tp]
    y = add(h, b)  # f32[8, 2, 6@tp]
    loss = sum(y, (0, 1, 2))  # f32[] partial(tp)
    return loss
"""


@pytest.mark.parametrize("added", ["add(h, b)", "add(b, h)"])
def test_a_product_takes_the_bias_with_it(added: str) -> None:
    done = bias(fused_graph(BODY.replace("add(h, b)", added)))
    verify_program(done, frozenset({"plain"}), "bias")
    assert_expected_inline(
        print_region(done.regions[0]),
        """\
region main phase microbatch:
  param w: f32[4, 6@tp]
  param b: f32[6@tp]
  param c: f32[4]
  forward:
    input x: f32[8, 2, 4]
    w_t  = permute(w, (1, 0))  # f32[6@tp, 4]
    y    = linear(x, w_t, b)   # f32[8, 2, 6@tp]
    loss = sum(y, (0, 1, 2))   # f32[] partial(tp)
    return loss
""",
    )


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("y = add(h, b)", "y = add(h, h)"),  # read twice
        ("y = add(h, b)", "y = add(h, b, alpha=2)"),
        ("y = add(h, b)", "y = add(h, 1.0)"),
        ("param b: f32[6@tp]", "param b: f32[1]"),  # one number for all columns
        ("param b: f32[6@tp]", "param b: f64[6@tp]"),
        ("    loss =", "    z = relu(h)  # f32[8, 2, 6@tp]\n    loss ="),
        ("param w: f32[4, 6@tp]", "param w: f32[8, 4, 6@tp]"),  # a product of batches
    ],
)
def test_others_stay_apart(line: str, other: str) -> None:
    program = fused_graph(BODY.replace(line, other))
    assert bias(program) == program


@pytest.mark.parametrize(
    ("shape", "sums"),
    [("6@tp", "grad_b = sum(grad_y, (0, 1), False)"), ("2, 6@tp", "grad_b = sum(grad_y, (0,), False)")],
)
def test_the_gradient_of_a_bias_is_summed_to_its_own_shape(shape: str, sums: str) -> None:
    """Without dimensions of one element, which a reshape would drop: kernels add such sums to buffers themselves."""
    program = differentiate(fused_graph(BODY.replace("param b: f32[6@tp]", f"param b: f32[{shape}]")))
    text = re.sub(" +", " ", print_region(program.regions[0]))
    assert sums in text
    assert "grad_b_1" not in text


def test_the_gradient_of_a_bias_with_dimensions_of_one_keeps_them() -> None:
    program = differentiate(fused_graph(BODY.replace("param b: f32[6@tp]", "param b: f32[1, 6@tp]")))
    text = re.sub(" +", " ", print_region(program.regions[0]))
    assert "grad_b_1 = sum(grad_y, (0, 1), True)" in text
    assert "grad_b = reshape(grad_b_1, (1, 3))" in text
