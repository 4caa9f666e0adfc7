"""The groups of operations that become kernels, and the text of programs with kernels."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from partc.ir.interpreter import evaluate
from partc.ir.parser import parse
from partc.ir.printer import print_program, print_region
from partc.ir.program import Program
from partc.ir.verifier import faults_of
from partc.passes.fuse import fuse
from partc.rules.strides import dense
from tests.programs import fused_graph

GATED = """
  param wg: f32[8, 6]
  param wu: f32[8, 6]
  param wd: f32[6, 8]
  forward:
    input x: f32[4, 6]
    gate = linear(x, wg)  # f32[4, 8]
    a = silu(gate)  # f32[4, 8]
    up = linear(x, wu)  # f32[4, 8]
    h = mul(a, up)  # f32[4, 8]
    y = linear(h, wd)  # f32[4, 6]
    loss = sum(y, (0, 1), False)  # f32[]
    return loss
"""
WAITING = """
  forward:
    input x: f32[4, 6]
    a = mul(x, 2.0)  # f32[4, 6]
    s = all_reduce(a, axis="tp")  # f32[4, 6]
    b = add(a, s)  # f32[4, 6]
    c = exp(b)  # f32[4, 6]
    d = exp(a)  # f32[4, 6]
    e = linear(c, d)  # f32[4, 4]
    loss = sum(e, (0, 1), False)  # f32[]
    return loss
"""
SAVED = """
  forward:
    input x: f32[4, 6]
    t = permute(x, (1, 0))  # f32[6, 4]
    u = mul(t, t)  # f32[6, 4]
    v = exp(u)  # f32[6, 4]
    w = slice(v, 0, 0, 3)  # f32[3, 4]
    loss = sum(w, (0, 1), False)  # f32[]
    return loss
  saved u, t
"""
ALIKE = """
  param w: f32[6, 6]
  forward:
    input x: f32[4, 6]
    a = mul(x, x)  # f32[4, 6]
    b = exp(a)  # f32[4, 6]
    p = linear(b, w)  # f32[4, 6]
    c = mul(p, p)  # f32[4, 6]
    d = exp(c)  # f32[4, 6]
    q = linear(d, w)  # f32[4, 6]
    e = mul(q, q)  # f32[4, 6]
    f = exp(e)  # f32[4, 6]
    loss = sum(f, (0, 1), False)  # f32[]
    return loss
"""
TURNED = """
  forward:
    input x: f32[4, 6]
    a = mul(x, 2.0)  # f32[4, 6]
    b = reshape(a, (2, 12))  # f32[2, 12]
    c = sin(b)  # f32[2, 12]
    d = reshape(c, (4, 6))  # f32[4, 6]
    e = add(a, d)  # f32[4, 6]
    loss = sum(e, (0, 1), False)  # f32[]
    return loss
"""
REMADE = """
  param w: f32[6, 6]
  param n: f32[6]
  forward:
    input x: f32[4, 6]
    p = linear(x, w)  # f32[4, 6]
    a = silu(p)  # f32[4, 6]
    b = tanh(p)  # f32[4, 6]
    h = mul(a, b)  # f32[4, 6]
    q = add(h, x)  # f32[4, 6]
    y, r = rms_norm(q, (6,), n, 1e-05)  # f32[4, 6] ; f32[4, 1]
    loss = linear(y, b)  # f32[]
    return loss
  saved a, b, p, q, r
  backward:
    input grad_loss: f32[]
    input a: f32[4, 6]
    input b: f32[4, 6]
    input p: f32[4, 6]
    input q: f32[4, 6]
    input r: f32[4, 1]
    grad_y = linear_grad_input(grad_loss, b)  # f32[4, 6]
    grad_q, grad_n = rms_norm_backward(grad_y, q, (6,), n, r)  # f32[4, 6] ; f32[6]
    grad_b = mul(grad_q, a)  # f32[4, 6]
    grad_a = mul(grad_q, b)  # f32[4, 6]
    grad_s = silu_backward(grad_a, p)  # f32[4, 6]
    grad_t = tanh_backward(grad_b, b)  # f32[4, 6]
    grad_p = add(grad_s, grad_t)  # f32[4, 6]
    grad_x = linear_grad_input(grad_p, w)  # f32[4, 6]
    return grad_x, grad_n
"""
WIDE = """
  param w: f32[9000, 6]
  param n: f32[9000]
  forward:
    input x: f32[4, 9000]
    input r: f32[4, 1]
    input z: f32[4, 9000]
    y = linear(x, w)  # f32[4, 6]
    loss = sum(y, (0, 1), False)  # f32[]
    return loss
  saved x, r, z
  backward:
    input grad_loss: f32[4, 6]
    input x: f32[4, 9000]
    input r: f32[4, 1]
    input z: f32[4, 9000]
    grad_y = linear_grad_input(grad_loss, w)  # f32[4, 9000]
    grad_q, grad_n = rms_norm_backward(grad_y, x, (9000,), n, r)  # f32[4, 9000] ; f32[9000]
    grad_z = silu_backward(grad_q, z)  # f32[4, 9000]
    return grad_z, grad_n
"""
SECOND = """
  param w: f32[6, 6]
  forward:
    input x: f32[4, 6]
    p = linear(x, w)  # f32[4, 6]
    y, buffer = log_sigmoid_forward(p)  # f32[4, 6] ; f32[4, 6]
    most, at = max(p, -1, True)  # f32[4, 1] ; i64[4, 1]
    least, place = min(p, -1, True)  # f32[4, 1] ; i64[4, 1]
    z = sub(y, most)  # f32[4, 6]
    q = linear(z, place)  # f32[4, 6]
    loss = linear(q, least)  # f32[]
    return loss
  saved p, buffer
  backward:
    input grad_loss: f32[]
    input p: f32[4, 6]
    input buffer: f32[4, 6]
    grad_y = linear_grad_input(grad_loss, p)  # f32[4, 6]
    grad_p = log_sigmoid_backward(grad_y, p, buffer)  # f32[4, 6]
    grad_x = linear_grad_input(grad_p, w)  # f32[4, 6]
    return grad_x
"""
BY_HAND = """
  param w: f32[6, 6]
  forward:
    input x: f32[2, 4, 6]
    p = linear(x, w)  # f32[2, 4, 6]
    e = exp(p)  # f32[2, 4, 6]
    s = sum(e, (2,), True)  # f32[2, 4, 1]
    y = div(e, s)  # f32[2, 4, 6]
    loss = linear(y, w)  # f32[]
    return loss
  saved e, s
  backward:
    input grad_loss: f32[]
    input e: f32[2, 4, 6]
    input s: f32[2, 4, 1]
    grad_y = linear_grad_input(grad_loss, w)  # f32[2, 4, 6]
    grad_s_1 = div(e, s)  # f32[2, 4, 6]
    grad_s_2 = div(grad_s_1, s)  # f32[2, 4, 6]
    grad_s_3 = neg(grad_y)  # f32[2, 4, 6]
    grad_s_4 = mul(grad_s_3, grad_s_2)  # f32[2, 4, 6]
    grad_s = sum(grad_s_4, (2,), False)  # f32[2, 4]
    grad_e_1 = div(grad_y, s)  # f32[2, 4, 6]
    grad_e_2 = reshape(grad_s, (2, 4, 1))  # f32[2, 4, 1]
    grad_e_3 = expand(grad_e_2, (2, 4, 6))  # f32[2, 4, 6]
    grad_e = add(grad_e_1, grad_e_3)  # f32[2, 4, 6]
    grad_p = mul(grad_e, e)  # f32[2, 4, 6]
    grad_x = linear_grad_input(grad_p, w)  # f32[2, 4, 6]
    return grad_x
"""
ACROSS = """
  forward:
    input x: f32[6, 6]
    e = exp(x)  # f32[6, 6]
    s = sum(e, (1,), True)  # f32[6, 1]
    t = reshape(s, (1, 6))  # f32[1, 6]
    y = div(e, t)  # f32[6, 6]
    u = expand(t, (6, 6))  # f32[6, 6]
    z = div(e, u)  # f32[6, 6]
    loss = linear(y, z)  # f32[6, 6]
    return loss
"""
MERGED = """
  param w: f32[6, 12]
  forward:
    input x: f32[2, 3, 4, 4]
    a = mul(x, 2.0)  # f32[2, 3, 4, 4]
    b = permute(a, (0, 2, 1, 3))  # f32[2, 4, 3, 4]
    c = reshape(b, (2, 4, 12))  # f32[2, 4, 12]
    y = linear(c, w)  # f32[2, 4, 6]
    loss = sum(y, (0, 1, 2), False)  # f32[]
    return loss
"""


def shown(body: str) -> str:
    """The region after fusing, whose text reads back and which is well formed."""
    after = fuse(fused_graph(body), kernels="triton")
    assert parse(print_program(after)) == after
    assert not list(faults_of(after, {"local"}))
    return print_region(after.regions[0])


def kernels_of(program: Program) -> list[dict[str, object]]:
    return [dict(op.attrs) for op in program.regions[0].forward.ops if op.body]


def test_a_gated_layer_reads_as_agreed() -> None:
    before = fused_graph(GATED)
    assert fuse(before) == before  # where kernels are PyTorch's
    assert_expected_inline(
        shown(GATED),
        """\
region main phase microbatch kernels triton:
  param wg: f32[8, 6]
  param wu: f32[8, 6]
  param wd: f32[6, 8]
  forward:
    input x: f32[4, 6]
    gate = linear(x, wg)                       # f32[4, 8]
    up   = linear(x, wu)                       # f32[4, 8]
    h    = fused(gate, up, kernel="silu_mul")  # f32[4, 8]
    | a = silu(gate)  # f32[4, 8]
    | h = mul(a, up)  # f32[4, 8]
    y    = linear(h, wd)                       # f32[4, 6]
    loss = sum(y, (0, 1), False)               # f32[]
    return loss
""",
    )


def test_a_group_never_waits_for_what_depends_on_it() -> None:
    """Between a and b there is a collective, which reads a: d may join a, but not b."""
    assert_expected_inline(
        shown(WAITING),
        """\
region main phase microbatch kernels triton:
  forward:
    input x: f32[4, 6]
    a, d = fused(x, kernel="mul_exp", strided=(0,))  # f32[4, 6] ; f32[4, 6]
    | a = mul(x, 2.0)  # f32[4, 6]
    | d = exp(a)       # f32[4, 6]
    s    = all_reduce(a, axis="tp")                  # f32[4, 6]
    c    = fused(a, s, kernel="add_exp")             # f32[4, 6]
    | b = add(a, s)  # f32[4, 6]
    | c = exp(b)     # f32[4, 6]
    e    = linear(c, d)                              # f32[4, 4]
    loss = sum(e, (0, 1), False)                     # f32[]
    return loss
""",
    )


def test_what_is_saved_is_still_written_and_views_belong_to_what_reads_them() -> None:
    assert_expected_inline(
        shown(SAVED),
        """\
region main phase microbatch kernels triton:
  forward:
    input x: f32[4, 6]
    t    = permute(x, (1, 0))                        # f32[6, 4]
    u, v = fused(x, kernel="mul_exp", strided=(0,))  # f32[6, 4] ; f32[6, 4]
    | t = permute(x, (1, 0))  # f32[6, 4]
    | u = mul(t, t)           # f32[6, 4]
    | v = exp(u)              # f32[6, 4]
    w    = slice(v, 0, 0, 3)                         # f32[3, 4]
    loss = sum(w, (0, 1), False)                     # f32[]
    return loss
  saved u, t
""",
    )


def test_kernels_that_are_alike_share_a_name() -> None:
    """The input may be strided in memory, what a product makes is not: these differ."""
    assert kernels_of(fuse(fused_graph(ALIKE), kernels="triton")) == [
        {"kernel": "mul_exp", "strided": (0,)},
        {"kernel": "mul_exp_2"},
        {"kernel": "mul_exp_2"},
    ]


def test_what_backward_kernels_make_again_is_not_saved() -> None:
    """a is read by kernels alone and made of p; b is read by a product too, and q is made of what isn't saved."""
    assert_expected_inline(
        shown(REMADE),
        """\
region main phase microbatch kernels triton:
  param w: f32[6, 6]
  param n: f32[6]
  forward:
    input x: f32[4, 6]
    p          = linear(x, w)                                                       # f32[4, 6]
    b, q, y, r = fused(p, x, n, kernel="silu_tanh_mul_add", along=1, strided=(1,))  # f32[4, 6] ; f32[4, 6] ; f32[4, 6] ; f32[4, 1]
    | a          = silu(p)                               # f32[4, 6]
    | b          = tanh(p)                               # f32[4, 6]
    | h          = mul(a, b)                             # f32[4, 6]
    | q          = add(h, x)                             # f32[4, 6]
    | y_square   = mul(q, q)                             # f32[4, 6]
    | y_mean_sum = sum(y_square, (1,), True)             # f32[4, 1]
    | y_mean     = mul(y_mean_sum, 0.16666666666666666)  # f32[4, 1]
    | y_var      = add(y_mean, 1e-05)                    # f32[4, 1]
    | r          = rsqrt(y_var)                          # f32[4, 1]
    | y_unit     = mul(q, r)                             # f32[4, 6]
    | y          = mul(y_unit, n)                        # f32[4, 6]
    loss       = linear(y, b)                                                       # f32[]
    return loss
  saved b, p, q, r
  backward:
    input grad_loss: f32[]
    input b: f32[4, 6]
    input p: f32[4, 6]
    input q: f32[4, 6]
    input r: f32[4, 1]
    grad_y         = linear_grad_input(grad_loss, b)                                                     # f32[4, 6]
    grad_n, grad_p = fused(p, q, r, grad_y, n, b, kernel="silu_rms_norm_backward_mul_silu_backward", along=1)  # f32[6] ; f32[4, 6]
    | a                = silu(p)                                     # f32[4, 6]
    | grad_q_unit      = mul(q, r)                                   # f32[4, 6]
    | grad_q_scaled    = mul(grad_y, n)                              # f32[4, 6]
    | grad_q_product   = mul(grad_q_scaled, grad_q_unit)             # f32[4, 6]
    | grad_q_along_sum = sum(grad_q_product, (1,), True)             # f32[4, 1]
    | grad_q_along     = mul(grad_q_along_sum, 0.16666666666666666)  # f32[4, 1]
    | grad_q_part      = mul(grad_q_unit, grad_q_along)              # f32[4, 6]
    | grad_q_across    = sub(grad_q_scaled, grad_q_part)             # f32[4, 6]
    | grad_q           = mul(grad_q_across, r)                       # f32[4, 6]
    | grad_q_terms     = mul(grad_y, grad_q_unit)                    # f32[4, 6]
    | grad_n           = sum(grad_q_terms, (0,), False)              # f32[6]
    | grad_b           = mul(grad_q, a)                              # f32[4, 6]
    | grad_a           = mul(grad_q, b)                              # f32[4, 6]
    | grad_s           = silu_backward(grad_a, p)                    # f32[4, 6]
    | grad_t           = tanh_backward(grad_b, b)                    # f32[4, 6]
    | grad_p           = add(grad_s, grad_t)                         # f32[4, 6]
    grad_x         = linear_grad_input(grad_p, w)                                                        # f32[4, 6]
    return grad_x, grad_n
""",
    )


def test_a_derivative_of_a_norm_of_wide_rows_is_two_kernels() -> None:
    """Along rows with what reads its result, and down columns: both read x and the gradient."""
    assert_expected_inline(
        shown(WIDE),
        """\
region main phase microbatch kernels triton:
  param w: f32[9000, 6]
  param n: f32[9000]
  forward:
    input x: f32[4, 9000]
    input r: f32[4, 1]
    input z: f32[4, 9000]
    y    = linear(x, w)           # f32[4, 6]
    loss = sum(y, (0, 1), False)  # f32[]
    return loss
  saved x, r, z
  backward:
    input grad_loss: f32[4, 6]
    input x: f32[4, 9000]
    input r: f32[4, 1]
    input z: f32[4, 9000]
    grad_y = linear_grad_input(grad_loss, w)                                                             # f32[4, 9000]
    grad_n = fused(x, r, grad_y, kernel="rms_norm_grad_weight", along=1, strided=(0, 1))                 # f32[9000]
    | grad_n_unit  = mul(x, r)                       # f32[4, 9000]
    | grad_n_terms = mul(grad_y, grad_n_unit)        # f32[4, 9000]
    | grad_n       = sum(grad_n_terms, (0,), False)  # f32[9000]
    grad_z = fused(x, r, grad_y, n, z, kernel="rms_norm_grad_input_silu_backward", along=1, strided=(0, 1, 4))  # f32[4, 9000]
    | grad_q_unit      = mul(x, r)                                      # f32[4, 9000]
    | grad_q_scaled    = mul(grad_y, n)                                 # f32[4, 9000]
    | grad_q_product   = mul(grad_q_scaled, grad_q_unit)                # f32[4, 9000]
    | grad_q_along_sum = sum(grad_q_product, (1,), True)                # f32[4, 1]
    | grad_q_along     = mul(grad_q_along_sum, 0.00011111111111111112)  # f32[4, 1]
    | grad_q_part      = mul(grad_q_unit, grad_q_along)                 # f32[4, 9000]
    | grad_q_across    = sub(grad_q_scaled, grad_q_part)                # f32[4, 9000]
    | grad_q           = mul(grad_q_across, r)                          # f32[4, 9000]
    | grad_z           = silu_backward(grad_q, z)                       # f32[4, 9000]
    return grad_z, grad_n
""",
    )


def test_second_results_that_nobody_reads_are_not_made() -> None:
    """The buffer is for a derivative that needs none; of the least numbers, the places are read."""
    assert_expected_inline(
        shown(SECOND),
        """\
region main phase microbatch kernels triton:
  param w: f32[6, 6]
  forward:
    input x: f32[4, 6]
    p            = linear(x, w)                                      # f32[4, 6]
    least, place = min(p, -1, True)                                  # f32[4, 1] ; i64[4, 1]
    z            = fused(p, kernel="log_sigmoid_amax_sub", along=1)  # f32[4, 6]
    | y    = log_sigmoid(p)        # f32[4, 6]
    | most = amax(p, (-1,), True)  # f32[4, 1]
    | z    = sub(y, most)          # f32[4, 6]
    q            = linear(z, place)                                  # f32[4, 6]
    loss         = linear(q, least)                                  # f32[]
    return loss
  saved p
  backward:
    input grad_loss: f32[]
    input p: f32[4, 6]
    grad_y = linear_grad_input(grad_loss, p)             # f32[4, 6]
    grad_p = fused(p, grad_y, kernel="neg_sigmoid_mul")  # f32[4, 6]
    | grad_p_away = neg(p)                    # f32[4, 6]
    | grad_p_part = sigmoid(grad_p_away)      # f32[4, 6]
    | grad_p      = mul(grad_y, grad_p_part)  # f32[4, 6]
    grad_x = linear_grad_input(grad_p, w)                # f32[4, 6]
    return grad_x
""",
    )


def test_what_derivatives_make_of_sums_of_rows_stays_in_their_kernel() -> None:
    assert_expected_inline(
        shown(BY_HAND),
        """\
region main phase microbatch kernels triton:
  param w: f32[6, 6]
  forward:
    input x: f32[2, 4, 6]
    p       = linear(x, w)                             # f32[2, 4, 6]
    e, s, y = fused(p, kernel="exp_sum_div", along=1)  # f32[2, 4, 6] ; f32[2, 4, 1] ; f32[2, 4, 6]
    | e = exp(p)              # f32[2, 4, 6]
    | s = sum(e, (2,), True)  # f32[2, 4, 1]
    | y = div(e, s)           # f32[2, 4, 6]
    loss    = linear(y, w)                             # f32[]
    return loss
  saved e, s
  backward:
    input grad_loss: f32[]
    input e: f32[2, 4, 6]
    input s: f32[2, 4, 1]
    grad_y = linear_grad_input(grad_loss, w)                         # f32[2, 4, 6]
    grad_p = fused(e, s, grad_y, kernel="div_neg_mul_sum", along=1)  # f32[2, 4, 6]
    | grad_s_1    = div(e, s)                     # f32[2, 4, 6]
    | grad_s_2    = div(grad_s_1, s)              # f32[2, 4, 6]
    | grad_s_3    = neg(grad_y)                   # f32[2, 4, 6]
    | grad_s_4    = mul(grad_s_3, grad_s_2)       # f32[2, 4, 6]
    | grad_s_kept = sum(grad_s_4, (2,), True)     # f32[2, 4, 1]
    | grad_s      = reshape(grad_s_kept, (2, 4))  # f32[2, 4]
    | grad_e_1    = div(grad_y, s)                # f32[2, 4, 6]
    | grad_e_2    = reshape(grad_s, (2, 4, 1))    # f32[2, 4, 1]
    | grad_e_3    = expand(grad_e_2, (2, 4, 6))   # f32[2, 4, 6]
    | grad_e      = add(grad_e_1, grad_e_3)       # f32[2, 4, 6]
    | grad_p      = mul(grad_e, e)                # f32[2, 4, 6]
    grad_x = linear_grad_input(grad_p, w)                            # f32[2, 4, 6]
    return grad_x
""",
    )


def test_sums_of_rows_that_columns_are_divided_by_end_a_kernel() -> None:
    """There are as many rows as columns: shapes alone don't tell."""
    before = fused_graph(ACROSS)
    after = fuse(before, kernels="triton")
    assert kernels_of(after) == [{"kernel": "exp_sum", "along": 1, "strided": (0,)}, {"kernel": "div"}]
    values = {"x": torch.randn(6, 6, dtype=torch.float64)}
    first, second = (evaluate(item.regions[0].forward, values)["loss"] for item in (before, after))
    assert torch.equal(first, second)


def test_what_is_turned_and_merged_is_written_so() -> None:
    """A reshape of a permutation copies: a kernel writes in that order at once."""
    assert_expected_inline(
        shown(MERGED),
        """\
region main phase microbatch kernels triton:
  param w: f32[6, 12]
  forward:
    input x: f32[2, 3, 4, 4]
    c    = fused(x, kernel="mul", strided=(0,))  # f32[2, 4, 12]
    | a = mul(x, 2.0)               # f32[2, 3, 4, 4]
    | b = permute(a, (0, 2, 1, 3))  # f32[2, 4, 3, 4]
    | c = reshape(b, (2, 4, 12))    # f32[2, 4, 12]
    y    = linear(c, w)                          # f32[2, 4, 6]
    loss = sum(y, (0, 1, 2), False)              # f32[]
    return loss
""",
    )
    graphs = [item.regions[0].forward for item in (fused_graph(MERGED), fuse(fused_graph(MERGED), kernels="triton"))]
    values = {"x": torch.randn(2, 3, 4, 4), "w": torch.randn(6, 12)}
    first, second = (evaluate(graph, values)["loss"] for graph in graphs)
    assert torch.equal(first, second)


HALVES = """
  param w: f32[6, 16]
  forward:
    input gate: f32[4, 8]
    input up: f32[4, 8]
    input grad: f32[4, 8]
    a = silu(gate)  # f32[4, 8]
    grad_up = mul(grad, a)  # f32[4, 8]
    b = mul(grad, up)  # f32[4, 8]
    grad_gate = silu_backward(b, gate)  # f32[4, 8]
    grad_both = cat((grad_gate, grad_up), 1)  # f32[4, 16]
    y = linear(grad_both, w)  # f32[4, 6]
    loss = sum(y, (0, 1), False)  # f32[]
    return loss
"""


def test_results_that_one_product_reads_side_by_side_are_written_so() -> None:
    assert_expected_inline(
        shown(HALVES),
        """\
region main phase microbatch kernels triton:
  param w: f32[6, 16]
  forward:
    input gate: f32[4, 8]
    input up: f32[4, 8]
    input grad: f32[4, 8]
    grad_both = fused(gate, grad, up, kernel="silu_mul_silu_backward", strided=(0, 1, 2))  # f32[4, 16]
    | a         = silu(gate)                    # f32[4, 8]
    | grad_up   = mul(grad, a)                  # f32[4, 8]
    | b         = mul(grad, up)                 # f32[4, 8]
    | grad_gate = silu_backward(b, gate)        # f32[4, 8]
    | grad_both = cat((grad_gate, grad_up), 1)  # f32[4, 16]
    y         = linear(grad_both, w)                                                       # f32[4, 6]
    loss      = sum(y, (0, 1), False)                                                      # f32[]
    return loss
""",
    )
    others = {
        "one of them is read as well": (
            "loss = sum(y",
            "c = linear(grad_up, grad_gate)  # f32[4, 4]\n    loss = sum(y",
        ),
        "another kernel reads through it": ("linear(grad_both, w)  # f32[4, 6]", "exp(grad_both)  # f32[4, 16]"),
        "one of them is saved": ("return loss", "return loss\n  saved grad_up"),
        "one is there twice": ("(grad_gate, grad_up)", "(grad_up, grad_up)"),
    }
    for why, (old, new) in others.items():
        after = fuse(fused_graph(HALVES.replace(old, new)), kernels="triton").regions[0].forward
        assert any(op.name == "cat" for op in after.ops) is (why != "another kernel reads through it"), why
        joined = [op for op in after.ops if any(value.name == "grad_both" for value in op.results)]
        assert not any(op.body for op in joined), why


def test_views_that_another_kernel_reads_through_stay_its_own() -> None:
    """A reshape that another kernel reads through is not the end of the first: there is one kernel, from x on."""
    more = MERGED.replace(
        "y = linear(c, w)  # f32[2, 4, 6]", "d = cat((c, c), 1)  # f32[2, 8, 12]\n    y = exp(d)  # f32[2, 8, 12]"
    )
    more = more.replace(
        "loss = sum(y, (0, 1, 2), False)  # f32[]",
        "z = mul(y, y)  # f32[2, 8, 12]\n    loss = sum(z, (0, 1, 2), False)  # f32[]",
    )
    before = fused_graph(more)
    after = fuse(before, kernels="triton")
    assert kernels_of(after) == [{"kernel": "mul_exp", "strided": (0,)}]
    values = {"x": torch.randn(2, 3, 4, 4)}
    first, second = (evaluate(item.regions[0].forward, values)["loss"] for item in (before, after))
    assert torch.equal(first, second)


def test_memory_is_dense_until_somebody_turns_it() -> None:
    """The second call reads what the first returns; a region that returns a view makes it strided for its readers."""
    text = """
program two mesh 1 microbatches 1 loss loss
input x
value x: f32[4, 4]
value h: f32[4, 4]
value loss: f32[4, 4]
parameter w: f32[4, 4]
call first = first(x; w) -> h
call second = second(h; ) -> loss
region first phase microbatch:
  param w: f32[4, 4]
  forward:
    input x: f32[4, 4]
    a = exp(x)  # f32[4, 4]
    b = linear(a, w)  # f32[4, 4]
    c = permute(b, (1, 0))  # f32[4, 4]
    return {}
region second phase microbatch:
  forward:
    input h: f32[4, 4]
    d = exp(h)  # f32[4, 4]
    return d
"""
    straight, turned = (dense(parse(text.format(name))) for name in ("b", "c"))
    assert straight == {"first": {"w", "b"}, "second": {"h", "d"}}
    assert turned == {"first": {"w", "b"}, "second": set()}


def test_a_fused_program_computes_the_same() -> None:
    before = fused_graph(TURNED)
    after = fuse(before, kernels="triton")
    assert len(after.regions[0].forward.ops) == 2
    values = {"x": torch.randn(4, 6, dtype=torch.float64)}
    first, second = (evaluate(item.regions[0].forward, values)["loss"] for item in (before, after))
    assert torch.equal(first, second)
