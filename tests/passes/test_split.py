"""Backward passes in two halves: their text, and the results of the emitted methods."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from partc.cost.simulation import Durations, timeline
from partc.errors import InternalError
from partc.ir.mesh import Mesh
from partc.ir.parser import parse
from partc.ir.printer import print_program, print_region
from partc.ir.program import Action, Op, Program, Ref, Transfer
from partc.ir.verifier import verify_program
from partc.passes.check import check
from partc.passes.schedule import schedule
from partc.passes.split import split

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


CHAIN = """
program chain mesh pp=3,dp=1,tp=1 microbatches 2 loss loss
input x
value x: f32[6@mb, 4]
value h1: f32[6@mb, 4]
value h2: f32[6@mb, 4]
value loss: f32[] partial(mb)
parameter a.0: f32[4, 4] vary(mb)
parameter a.1: f32[4, 4] vary(mb)
parameter a.2: f32[4, 4] vary(mb)
call block.0 = block(x; a.0) -> h1
call block.1 = block(h1; a.1) -> h2 stage 1
call last = last(h2; a.2) -> loss stage 2
transfer h1 0 -> 1 gradient
transfer h2 1 -> 2 gradient

region block phase microbatch:
  param a: f32[4, 4] vary(mb)
  forward:
    input x: f32[6@mb, 4]
    h = linear(x, a)  # f32[6@mb, 4]
    y = tanh(h)  # f32[6@mb, 4]
    return y
  saved x, y
  backward:
    input grad_y: f32[6@mb, 4]
    input x: f32[6@mb, 4]
    input y: f32[6@mb, 4]
    grad_h = tanh_backward(grad_y, y)  # f32[6@mb, 4]
    grad_a = linear_grad_weight(grad_h, x)  # f32[4, 4] partial(mb)
    grad_x = linear_grad_input(grad_h, a)  # f32[6@mb, 4]
    return grad_x, grad_a

region last phase microbatch:
  param a: f32[4, 4] vary(mb)
  forward:
    input x: f32[6@mb, 4]
    y = linear(x, a)  # f32[6@mb, 4]
    loss = sum(y, (0, 1), False)  # f32[] partial(mb)
    return loss
  saved x
  backward:
    input grad_loss: f32[]
    input x: f32[6@mb, 4]
    grad_y = expand(grad_loss, (6, 4))  # f32[6@mb, 4]
    grad_a = linear_grad_weight(grad_y, x)  # f32[4, 4] partial(mb)
    grad_x = linear_grad_input(grad_y, a)  # f32[6@mb, 4]
    return grad_x, grad_a
"""


def test_stages_that_return_gradients_are_cut_where_no_more_memory_is_kept() -> None:
    """The first stage returns none and keeps its whole pass; the last one's weights need more than the pass reads."""
    chain = parse(CHAIN)
    done = split(chain)
    verify_program(done, frozenset(), "split")
    assert [call.region for call in done.calls] == ["block", "block_2", "last"]
    halves = split(chain, halves=True)
    assert done.region("block") == chain.region("block") and done.region("last") == chain.region("last")
    assert done.region("block_2") == replace(halves.region("block"), name="block_2")
    first, second, _ = (" ".join(map(str, row)) for row in schedule(done, kind="1f1b").schedule)
    assert "0B0" in first.split() and "0I0" not in first.split()
    assert second == (
        "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_B0 1F1 1SEND_F1 1RECV_B1 1I0 1SEND_B0 1W0 1I1 1SEND_B1 1W1 1REDUCE_GRAD"
    )


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (2, 8), (4, 4), (4, 16)])
@pytest.mark.parametrize("transfer", [0, 21, 50])
def test_a_transfer_is_hidden_behind_gradients_of_weights(stages: int, microbatches: int, transfer: int) -> None:
    """In seconds: F, I and W take 100 each. Up to W / 2 only the transfers that fill and drain the pipeline are exposed,
    and no stage waits at the end for the weights' gradients of later stages."""
    chain = parse(CHAIN)
    calls = (
        replace(chain.calls[0], name=f"block.{stage}", stage=stage, args=(f"h{stage}",), results=(f"h{stage + 1}",))
        for stage in range(stages)
    )
    links = (Transfer(value=f"h{stage}", source=stage - 1, target=stage, gradient=True) for stage in range(1, stages))
    mesh = Mesh.parse(f"pp={stages}")
    program = replace(chain, mesh=mesh, microbatches=microbatches, calls=tuple(calls), transfers=tuple(links))
    durations = Durations(forward=100, backward=200, inputs=100, weights=100, transfer=transfer)
    whole = 300 * (microbatches + stages - 1)
    ends = 2 * transfer * (stages - 1)
    assert timeline(schedule(split(program)), durations).makespan == whole + ends - 100 * (stages - 1)
    exposed = timeline(schedule(program), durations).makespan - whole - ends
    assert exposed >= microbatches // 2 * transfer  # a round trip for every other microbatch


@pytest.mark.parametrize("reason", ["a budget", "ZeRO 2", "one rank", "recomputation", "a collective"])
def test_backward_passes_stay_whole_where_halves_would_cost_something(reason: str) -> None:
    chain = parse(CHAIN)
    block = chain.region("block")
    assert block.backward is not None
    if reason == "one rank":
        chain = replace(chain, places=(0, 0, 0))
    elif reason == "recomputation":
        again = Op(name="linear", args=(Ref("x"), Ref("a")), results=(block.forward.ops[0].result,))
        y = block.forward.ops[1]
        graph = replace(block.backward, inputs=block.backward.inputs[:2], ops=(again, y, *block.backward.ops))
        chain = replace(chain, regions=(replace(block, saved=("x",), backward=graph), chain.regions[1]))
    elif reason == "a collective":
        moved = replace(block.backward.ops[0].result, name="grad_moved")
        gather = Op(name="all_gather", args=(Ref("grad_h"),), results=(moved,))
        graph = replace(block.backward, ops=(block.backward.ops[0], gather, *block.backward.ops[1:]))
        x = replace(graph.ops[-1], args=(Ref("grad_moved"), Ref("a")))
        chain = replace(
            chain, regions=(replace(block, backward=replace(graph, ops=(*graph.ops[:-1], x))), chain.regions[1])
        )
    assert split(chain, zero=2 * (reason == "ZeRO 2"), budget=1 if reason == "a budget" else None) == chain


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
