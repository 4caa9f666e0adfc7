"""Which operations become one kernel, and what a program with kernels looks like."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from partc.interpret import evaluate
from partc.parser import parse
from partc.passes.fuse import fuse
from partc.printer import print_program, print_region
from partc.program import Program
from partc.verifier import faults_of
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
region main phase microbatch:
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
region main phase microbatch:
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
region main phase microbatch:
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


def test_a_fused_program_computes_the_same() -> None:
    before = fused_graph(TURNED)
    after = fuse(before, kernels="triton")
    assert len(after.regions[0].forward.ops) == 2
    values = {"x": torch.randn(4, 6, dtype=torch.float64)}
    first, second = (evaluate(item.regions[0].forward, values)["loss"] for item in (before, after))
    assert torch.equal(first, second)
