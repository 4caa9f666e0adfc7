"""Backward passes in two halves: their text, and what the emitted methods compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from partc.errors import InternalError
from partc.parser import parse
from partc.passes.check import check
from partc.passes.split import split
from partc.printer import print_program, print_region
from partc.program import Action, Program
from partc.verifier import verify_program

PROGRAM = """
program two mesh pp=2,dp=1,tp=1 microbatches 2 loss loss
input x
value x: f32[6@mb, 5]
value h: f32[6@mb, 4]
value loss: f32[] partial(mb)
parameter a: f32[4, 5] vary(mb)
parameter b: f32[4] vary(mb)
call first = first(x; a) -> h
call last = last(h; b) -> loss stage 1
transfer h 0 -> 1 gradient

region first phase microbatch:
  param a: f32[4, 5] vary(mb)
  forward:
    input x: f32[6@mb, 5]
    h = linear(x, a)  # f32[6@mb, 4]
    return h
  saved x
  backward:
    input grad_h: f32[6@mb, 4]
    input x: f32[6@mb, 5]
    grad_a = linear_grad_weight(grad_h, x)  # f32[4, 5] partial(mb)
    return grad_a

region last phase microbatch:
  param b: f32[4] vary(mb)
  forward:
    input h: f32[6@mb, 4]
    y = mul(h, b)  # f32[6@mb, 4]
    loss = sum(y, (0, 1), False)  # f32[] partial(mb)
    return loss
  saved h
  backward:
    input grad_loss: f32[]
    input h: f32[6@mb, 4]
    grad_y = expand(grad_loss, (6, 4))  # f32[6@mb, 4]
    part = mul(grad_y, h)  # f32[6@mb, 4]
    grad_b = sum(part, (0,), False)  # f32[4] partial(mb)
    grad_h = mul(grad_y, b)  # f32[6@mb, 4]
    return grad_h, grad_b
"""


@pytest.fixture
def program() -> Program:
    return parse(PROGRAM)


def test_what_a_whole_backward_pass_stays(program: Program) -> None:
    assert split(program) == program


def test_weights_alone_are_all_left_for_later(program: Program) -> None:
    assert_expected_inline(
        print_region(split(program, halves=True).region("first")),
        """\
region first phase microbatch:
  param a: f32[4, 5] vary(mb)
  forward:
    input x: f32[6@mb, 5]
    h = linear(x, a)  # f32[6@mb, 4]
    return h
  saved x
  backward:
    input grad_h: f32[6@mb, 4]
    input x: f32[6@mb, 5]
    return grad_h, x
  kept grad_h, x
  weight:
    input grad_h: f32[6@mb, 4]
    input x: f32[6@mb, 5]
    grad_a = linear_grad_weight(grad_h, x)  # f32[4, 5] partial(mb)
    return grad_a
""",
    )


def test_what_both_halves_need_is_made_in_the_first(program: Program) -> None:
    assert_expected_inline(
        print_region(split(program, halves=True).region("last")),
        """\
region last phase microbatch:
  param b: f32[4] vary(mb)
  forward:
    input h: f32[6@mb, 4]
    y    = mul(h, b)              # f32[6@mb, 4]
    loss = sum(y, (0, 1), False)  # f32[] partial(mb)
    return loss
  saved h
  backward:
    input grad_loss: f32[]
    input h: f32[6@mb, 4]
    grad_y = expand(grad_loss, (6, 4))  # f32[6@mb, 4]
    grad_h = mul(grad_y, b)             # f32[6@mb, 4]
    return grad_h, grad_y, h
  kept grad_y, h
  weight:
    input grad_y: f32[6@mb, 4]
    input h: f32[6@mb, 4]
    part   = mul(grad_y, h)          # f32[6@mb, 4]
    grad_b = sum(part, (0,), False)  # f32[4] partial(mb)
    return grad_b
""",
    )


def test_a_gradient_that_falls_out_on_the_way_stays_there(program: Program) -> None:
    region = program.region("last")
    assert region.backward is not None
    ops = tuple(replace(op, results=(*op.results, replace(op.result, name="grad_b"))) for op in region.backward.ops[:1])
    both = replace(region.backward, ops=(*ops, region.backward.ops[3]))
    done = split(replace(program, regions=(program.regions[0], replace(region, backward=both))), halves=True)
    assert done.region("last").weight is None and done.region("last").kept == ()


def test_split_programs_are_well_formed_and_read_back(program: Program) -> None:
    done = split(program, halves=True)
    verify_program(done, frozenset(), "split")
    assert parse(print_program(done)) == done
    with pytest.raises(InternalError, match="split already"):
        split(done, halves=True)


def _actions(text: str) -> tuple[Action, ...]:
    parsed = parse(f"program p mesh 1 microbatches 1 loss loss\nschedule 0: {text}\n")
    return parsed.schedule[0]


@pytest.mark.parametrize(
    ("order", "wrong"),
    [
        ("0F0 1F0 1I0 0I0 0W0 1W0", ""),
        ("0F0 1F0 1B0 0I0 0W0", ""),
        ("1F0 0F0 1B0 0B0", "wrong order"),
        ("0F0 1F0 0B0 1B0", "wrong order"),
        ("0F0 1F0 1W0 1I0 0B0", "stage 1 does"),
        ("0F0 1F0 1I0 0B0", "stage 1 does"),
    ],
)
def test_stages_of_one_rank_hand_over_in_order(program: Program, order: str, wrong: str) -> None:
    one_rank = replace(split(program, halves=True), mesh=parse("program p mesh 1 microbatches 1 loss l").mesh)
    done = replace(one_rank, microbatches=1, places=(0, 0), schedule=(_actions(f"{order} 0REDUCE_GRAD 1REDUCE_GRAD"),))
    if wrong:
        with pytest.raises(InternalError, match=wrong):
            check(done)
    else:
        check(done)
