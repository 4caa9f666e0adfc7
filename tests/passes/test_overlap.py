"""Communication concurrent with computation: separate waits, buckets of gradients, and gathers one call ahead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import partc
from partc.communication.events import Entered, events
from partc.communication.execution import Execution, StatementRun
from partc.errors import InternalError
from partc.ir.collectives import MOVING
from partc.ir.mesh import Mesh
from partc.ir.parser import parse
from partc.ir.printer import print_graph, print_program, print_region
from partc.ir.program import Action, Op, Program
from partc.ir.verifier import verify_program
from partc.package.verify import verify
from partc.passes.actions import actions
from partc.passes.bucket import bucket
from partc.passes.overlap import overlap
from partc.passes.overlap.joined import with_joined_sums
from partc.passes.prefetch import prefetch
from partc.passes.zero import zero
from partc.rehearsal.late import late_actions
from partc.rehearsal.rehearsal import Rehearsal, rehearse
from partc.runtime.comm.virtual import VirtualComm, World
from partc.runtime.execution.parts import Parts
from partc.runtime.execution.sums import Bucket, Sums
from partc.runtime.layout import Shard

EXAMPLES = Path(__file__).parents[2] / "examples"

PROGRAM = """
program net mesh dp=2,tp=2 microbatches 1 loss loss
input x
value x: f32[4096@dp, 2048]
value h: f32[4096@dp, 2048]
value loss: f32[] partial(dp)
parameter first.w: f32[2048, 2048] reduce(dp)
parameter second.w: f32[2048, 2048] reduce(dp)
parameter second.b: f32[2048] reduce(dp,tp)
call first = first(x; first.w) -> h
call second = second(h; second.w, second.b) -> loss

region first phase microbatch:
  param first.w: f32[2048, 2048] vary(dp)
  forward:
    input x: f32[4096@dp, 2048]
    h = linear(x, first.w)  # f32[4096@dp, 2048]
    return h
  saved x
  backward:
    input grad_h: f32[4096@dp, 2048]
    input x: f32[4096@dp, 2048]
    grad_first.w = linear_grad_weight(grad_h, x)  # f32[2048, 2048] partial(dp)
    return grad_first.w

region second phase microbatch:
  param second.w: f32[2048@tp, 2048] vary(dp)
  param second.b: f32[2048] vary(dp,tp)
  forward:
    input h: f32[4096@dp, 2048]
    y = linear(h, second.w)  # f32[4096@dp, 2048@tp]
    z = mul(y, y)  # f32[4096@dp, 2048@tp]
    loss_partial = sum(z, (0, 1), False)  # f32[] partial(dp,tp)
    loss = all_reduce(loss_partial, axis="tp")  # f32[] partial(dp)
    return loss
  saved y, h
  backward:
    input grad_loss: f32[]
    input y: f32[4096@dp, 2048@tp]
    input h: f32[4096@dp, 2048]
    grad_y = mul(y, grad_loss)  # f32[4096@dp, 2048@tp]
    grad_second.w = linear_grad_weight(grad_y, h)  # f32[2048@tp, 2048] partial(dp)
    grad_h_partial = matmul(grad_y, second.w)  # f32[4096@dp, 2048] partial(tp)
    grad_second.b = sum(grad_h_partial, (0,), False)  # f32[2048] partial(dp,tp)
    grad_h = all_reduce(grad_h_partial, axis="tp")  # f32[4096@dp, 2048]
    return grad_h, grad_second.w, grad_second.b
"""


def test_what_a_collective_does_not_need_runs_beside_it() -> None:
    """Gradients of weights are put behind it. The all-reduce of the loss has nothing to hide behind."""
    after = overlap(parse(PROGRAM))
    verify_program(after, frozenset(), "overlap")
    assert print_program(parse(print_program(after))) == print_program(after)
    assert "wait" not in print_region(after.region("first"))
    assert_expected_inline(
        print_region(after.region("second")).partition("  backward:\n")[2],
        """\
    input grad_loss: f32[]
    input y: f32[4096@dp, 2048@tp]
    input h: f32[4096@dp, 2048]
    grad_y         = mul(y, grad_loss)                      # f32[4096@dp, 2048@tp]
    grad_h_partial = matmul(grad_y, second.w)               # f32[4096@dp, 2048] partial(tp)
    grad_h_work    = all_reduce(grad_h_partial, axis="tp")  # f32[4096@dp, 2048]
    grad_second.w  = linear_grad_weight(grad_y, h)          # f32[2048@tp, 2048] partial(dp)
    grad_second.b  = sum(grad_h_partial, (0,), False)       # f32[2048] partial(dp,tp)
    grad_h         = wait(grad_h_work)                      # f32[4096@dp, 2048]
    return grad_h, grad_second.w, grad_second.b
""",
    )


def test_work_that_hides_nothing_moves_past_other_collectives() -> None:
    """Of two gradients of weights, the second hides the sum behind it, and the first the later gather."""
    program = parse("""
program net mesh tp=2 microbatches 1 loss loss
input x
value x: f32[4096@tp, 2048]
value loss: f32[] partial(tp)
parameter w: f32[8192@tp, 2048]
call net = net(x; w) -> loss

region net phase microbatch:
  param w: f32[8192@tp, 2048]
  forward:
    input x: f32[4096@tp, 2048]
    loss = sum(x, (0, 1), False)  # f32[] partial(tp)
    return loss
  saved x
  backward:
    input grad_loss: f32[]
    input x: f32[4096@tp, 2048]
    grad = mul(x, grad_loss)  # f32[4096@tp, 2048]
    full = all_gather(grad, dim=0, axis="tp")  # f32[4096, 2048]
    h = linear(full, w)  # f32[4096, 8192@tp]
    first = linear_grad_weight(h, full)  # f32[8192@tp, 2048]
    act = mul(h, h)  # f32[4096, 8192@tp]
    second = linear_grad_weight(act, full)  # f32[8192@tp, 2048]
    part = matmul(act, w)  # f32[4096, 2048] partial(tp)
    own = reduce_scatter(part, dim=0, axis="tp")  # f32[4096@tp, 2048]
    next = mul(own, own)  # f32[4096@tp, 2048]
    next_full = all_gather(next, dim=0, axis="tp")  # f32[4096, 2048]
    last = linear(next_full, w)  # f32[4096, 8192@tp]
    third = linear_grad_weight(last, next_full)  # f32[8192@tp, 2048]
    both = add(first, second)  # f32[8192@tp, 2048]
    grad_w = add(both, third)  # f32[8192@tp, 2048]
    return grad_w
""")
    assert_expected_inline(
        print_region(overlap(program).region("net")).partition("  backward:\n")[2],
        """\
    input grad_loss: f32[]
    input x: f32[4096@tp, 2048]
    grad           = mul(x, grad_loss)                       # f32[4096@tp, 2048]
    full           = all_gather(grad, dim=0, axis="tp")      # f32[4096, 2048]
    h              = linear(full, w)                         # f32[4096, 8192@tp]
    act            = mul(h, h)                               # f32[4096, 8192@tp]
    part           = matmul(act, w)                          # f32[4096, 2048] partial(tp)
    own_work       = reduce_scatter(part, dim=0, axis="tp")  # f32[4096@tp, 2048]
    second         = linear_grad_weight(act, full)           # f32[8192@tp, 2048]
    own            = wait(own_work)                          # f32[4096@tp, 2048]
    next           = mul(own, own)                           # f32[4096@tp, 2048]
    next_full_work = all_gather(next, dim=0, axis="tp")      # f32[4096, 2048]
    first          = linear_grad_weight(h, full)             # f32[8192@tp, 2048]
    next_full      = wait(next_full_work)                    # f32[4096, 2048]
    last           = linear(next_full, w)                    # f32[4096, 8192@tp]
    third          = linear_grad_weight(last, next_full)     # f32[8192@tp, 2048]
    both           = add(first, second)                      # f32[8192@tp, 2048]
    grad_w         = add(both, third)                        # f32[8192@tp, 2048]
    return grad_w
""",
    )


def test_searches_end_where_no_operation_is_left_to_postpone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each collective needs all that precede it: the work grows with their number, not with its square."""
    asked = 0

    def refs(op: Op) -> Iterator[str]:
        nonlocal asked
        asked += 1
        return plain(op)

    plain = Op.refs
    monkeypatch.setattr(Op, "refs", refs)
    found = []
    for depth in (100, 200):
        asked = 0
        steps = [
            f"""    p_{i} = sum(y_{i}, (1,), True)  # f32[1, 1] partial(tp)
    s_{i} = all_reduce(p_{i}, axis="tp")  # f32[1, 1]
    y_{i + 1} = mul(y_{i}, s_{i})  # f32[1, 8192@tp]
    z_{i} = relu(x)  # f32[4096, 8192@tp]"""
            for i in range(depth)
        ]
        program = parse(
            "program net mesh tp=2 microbatches 1 loss loss\ninput x\nvalue x: f32[4096, 8192@tp]\n"
            "value loss: f32[] partial(tp)\ncall net = net(x; ) -> loss\n\nregion net phase microbatch:\n  forward:\n"
            "    input x: f32[4096, 8192@tp]\n    y_0 = sum(x, (0,), True)  # f32[1, 8192@tp]\n"
            + "\n".join(steps)
            + f"\n    loss = sum(y_{depth}, (0, 1), False)  # f32[] partial(tp)\n    return loss\n"
        )
        overlap(program)
        found.append(asked)
    assert found[1] < 2.2 * found[0]


def test_small_sums_travel_together() -> None:
    """Not those that need each other, differ in shape, or are so large that the order of their additions would change."""
    program = parse("""
program net mesh tp=2 microbatches 1 loss loss
input x
value x: f32[4, 8@tp]
value loss: f32[] partial(tp)
call net = net(x; ) -> loss

region net phase microbatch:
  forward:
    input x: f32[4, 8@tp]
    a_part = sum(x, (1,), False)  # f32[4] partial(tp)
    a = all_reduce(a_part, axis="tp")  # f32[4]
    a_half = div(a, 2)  # f32[4]
    b_part = amax(x, (1,), False)  # f32[4] partial(tp)
    b = all_reduce(b_part, axis="tp")  # f32[4]
    other_part = sum(x, (1,), True)  # f32[4, 1] partial(tp)
    other = all_reduce(other_part, axis="tp")  # f32[4, 1]
    both = add(a_half, b)  # f32[4]
    wide = mul(x, other)  # f32[4, 8@tp]
    again_part = sum(wide, (1,), True)  # f32[4, 1] partial(tp)
    again = all_reduce(again_part, axis="tp")  # f32[4, 1]
    large = expand(again, (4, 500000))  # f32[4, 500000] partial(tp)
    one = all_reduce(large, axis="tp")  # f32[4, 500000]
    two = all_reduce(large, axis="tp")  # f32[4, 500000]
    loss = sum(x, (0, 1), False)  # f32[] partial(tp)
    return loss
""")
    graph = with_joined_sums(program.region("net").forward, {}, program.sizes)
    moved = [line for line in print_graph(graph).splitlines() if re.search("all_reduce|cat|split|div", line)]
    assert_expected_inline(
        "\n".join(moved),
        """\
a_and_b_partial = cat((a_part, b_part), 0)  # f32[8] partial(tp)
a_and_b = all_reduce(a_and_b_partial, axis="tp")  # f32[8]
a, b = split(a_and_b, (4, 4), 0)  # f32[4] ; f32[4]
a_half = div(a, 2)  # f32[4]
other = all_reduce(other_part, axis="tp")  # f32[4, 1]
again = all_reduce(again_part, axis="tp")  # f32[4, 1]
one = all_reduce(large, axis="tp")  # f32[4, 500000]
two = all_reduce(large, axis="tp")  # f32[4, 500000]""",
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_every_wait_has_its_collective_and_work_between(recompute: str) -> None:
    program = partc.compile(EXAMPLES / "gpt.py", mesh="1x2x2", microbatches=2, recompute=recompute).program
    waits = 0
    for graph in (graph for region in program.regions for graph in region.graphs):
        started: dict[str, int] = {}
        for index, op in enumerate(graph.ops):
            if op.name == "wait":
                between = graph.ops[started.pop(next(op.refs())) + 1 : index]
                assert any(other.name not in MOVING for other in between)
                waits += 1
            elif op.name in MOVING and op.result.name.endswith("_work"):
                started[op.result.name] = index
            assert not set(started) & set(op.refs()), "nothing but its wait reads what is on its way"
        assert not started
    assert waits >= 4


@pytest.mark.parametrize(
    ("size", "after"),
    [
        (50_000_000, {"first.w": "first", "second.w": "first", "second.b": "first"}),
        (10_000_000, {"first.w": "first", "second.w": "second", "second.b": "first"}),
        (0, {"first.w": "first", "second.w": "second", "second.b": "second"}),
    ],
)
def test_a_bucket_starts_when_it_is_full(size: int, after: dict[str, str]) -> None:
    """16 MiB of each matrix; the bias is summed over other axes, and waits for its own kind."""
    done = bucket(parse(PROGRAM), bucket=size)
    assert {parameter.name: _after(done, parameter.name) for parameter in done.parameters} == after
    assert print_program(parse(print_program(done))) == print_program(done)


def test_scattered_gradients_count_whole_in_a_bucket() -> None:
    """Each rank keeps 8 MiB of a matrix's 16, which fill a bucket of 16 MB; small parts do not fill one."""
    parted = zero(parse(PROGRAM), zero=1, zero_axes=("dp",))
    after = {size: _after(bucket(parted, bucket=size), "second.w") for size in (16_000_000, 25_000_000)}
    assert after == {16_000_000: "second", 25_000_000: "first"}
    many = replace(parted, mesh=Mesh.parse("dp=64,tp=2"))  # 256 KiB of each matrix
    assert _after(bucket(many, bucket=16_000_000), "second.w") == "first"


def _after(program: Program, name: str) -> str:
    """The call after which the first sum of a parameter's gradient starts."""
    return program.bucket(program.parameter(name).buckets[0]).after


def _world(work: Any, size: int = 2) -> None:
    world = World(size)
    groups = {"dp": tuple(range(size))}
    world.run(lambda rank: work(VirtualComm(world=world, rank=rank, coordinate={"dp": rank}, groups=groups, links={})))


def test_sums_start_bucket_by_bucket() -> None:
    shards = {name: Shard("f64[3]", reduce=("dp",)) for name in ("a", "b", "c")}
    buckets = {"late": Bucket(over=("dp",), first="b", last="c"), "soon": Bucket(over=("dp",), names=("a",))}

    def work(comm: VirtualComm) -> None:
        memory = torch.full((9,), float(comm.group(("dp",)).rank + 1), dtype=torch.float64)
        gradients = dict(zip(shards, memory.split(3), strict=True))
        sums = Sums(comm, shards, gradients, buckets)
        sums["late"].start()
        gradients["a"].add_(10)  # the call before it still adds to its own
        sums["soon"].start()
        sums["late"].wait()
        sums["soon"].wait()
        assert gradients["a"].tolist() == [23.0] * 3
        assert gradients["b"].tolist() == gradients["c"].tolist() == [3.0] * 3

    _world(work)


@pytest.mark.parametrize(("mesh", "zero"), [("2", 0), ("2", 1), ("pp=2,dp=2", 0)])
def test_sums_start_in_the_last_backward_alone(mesh: str, zero: int) -> None:
    """The same for accumulated batches: a batch whose gradients are only accumulated starts no sums."""
    program = partc.compile(EXAMPLES / "gpt.py", mesh=mesh, microbatches=2, bucket="20KB", zero=zero).program
    for place in range(program.mesh.axis("pp")):
        for updates in (True, False):
            steps = Execution(program, place).step(updates=updates)
            summing = {
                str(action)
                for action, found in steps
                if any((each.statement.verb, each.statement.subject) == ("start", "bucket") for each in found)
            }
            assert summing & {f"{place}{kind}{index}" for kind in "BIW" for index in range(2)} == (
                {f"{place}{'W' if place in program.split_stages else 'B'}1"} if updates else set()
            )


def test_what_is_on_its_way_must_not_change() -> None:
    def work(comm: VirtualComm) -> None:
        x = torch.ones(4)
        going = comm.group(("dp",)).start_all_reduce_(x)
        x[0] += 1
        going.wait()

    with pytest.raises(RuntimeError, match=r"all_reduce sum of float32\[4\] over dp was changed before"):
        _world(work)


class Fields(NamedTuple):
    w: Tensor


_GATHERS = """
program net mesh dp=2 microbatches 2 loss loss
input x
value x: f32[4@dp,mb, 4]
value h: f32[4@dp,mb, 4]
value loss: f32[] partial(dp,mb)
parameter a.w: f32[4@dp, 4] gather(dp) zero 3
parameter b.w: f32[4@dp, 4] gather(dp) zero 3
call a = a(x; a.w) -> h
call b = b(h; b.w) -> loss
schedule 0: 0F0 0B0 0F1 0B1 0REDUCE_GRAD

region a phase microbatch:
  param w: f32[4, 4] vary(dp,mb)
  forward:
    input x: f32[4@dp,mb, 4]
    h = linear(x, w)  # f32[4@dp,mb, 4]
    return h
  saved x
  backward:
    input grad_h: f32[4@dp,mb, 4]
    input x: f32[4@dp,mb, 4]
    grad_w = linear_grad_weight(grad_h, x)  # f32[4, 4] partial(dp,mb)
    return grad_w

region b phase microbatch:
  param w: f32[4, 4] vary(dp,mb)
  forward:
    input h: f32[4@dp,mb, 4]
    y = linear(h, w)  # f32[4@dp,mb, 4]
    loss = sum(y, (0, 1), False)  # f32[] partial(dp,mb)
    return loss
  saved h
  backward:
    input grad_loss: f32[]
    input h: f32[4@dp,mb, 4]
    grad_y = expand(grad_loss, (4, 4))  # f32[4@dp,mb, 4]
    grad_h = matmul(grad_y, w)  # f32[4@dp,mb, 4]
    grad_w = linear_grad_weight(grad_y, h)  # f32[4, 4] partial(dp,mb)
    return grad_h, grad_w
"""


def test_gathers_start_one_call_ahead() -> None:
    """The backward of `a` reads no parameters; what `b` reads twice in a row is gathered once."""
    program = prefetch(actions(parse(_GATHERS)))
    assert print_program(parse(print_program(program))) == print_program(program)
    assert _started(program) == ["UNSHARD: a", "F: b", "B: a", "F: b"]
    assert_expected_inline(
        _actions(program),
        """\
action 0F:
  early start gather a: all_gather(f32[8] over dp)  # 32 B
  wait gather a
  start gather b: all_gather(f32[8] over dp)  # 32 B
  run F a
  free gather a
  wait gather b
  start gather ahead 1
  run F b
  free gather b
action 0B:
  early start gather b: all_gather(f32[8] over dp)  # 32 B
  wait gather b
  start gather ahead 1
  run B b
  free gather b
  wait scatter behind 1
  start scatter b: reduce_scatter(f32[16] over dp)  # 32 B
  run B a
  wait scatter b
  start scatter a: reduce_scatter(f32[16] over dp)  # 32 B
action 0END:
  start result loss: all_reduce(f32[] over dp)  # 4 B
  wait result loss
  run update
action 0REDUCE_GRAD:
  wait scatter behind 1
schedule 0: 0UNSHARD>0F 0F0>0B 0B0>0F 0F1>0B 0B1 0REDUCE_GRAD""",
    )


def _kept(levels: bool = False) -> str:
    """The same program under ZeRO 1; with `levels`, over ranks of which some share a node."""
    text = _GATHERS.replace("zero 3", "zero 1 bucket(all)").replace("call a =", f"{_SCATTERED}call a =")
    return _over_nodes(text) if levels else text


_SCATTERED = "bucket all: scatter over dp in stage 0\n"


def _over_nodes(text: str) -> str:
    """A program on two nodes of two ranks."""
    text = text.replace("mesh dp=2", "mesh dp_out=2,dp_in=2").replace("@dp", "@dp_out,dp_in")
    text = text.replace("(dp", "(dp_out,dp_in").replace("over dp ", "over dp_out,dp_in ")
    return text.replace("call a =", "transport near(dp_in)\ncall a =")


def test_updated_parameters_are_gathered_beside_the_next_forward_pass() -> None:
    program = prefetch(actions(parse(_kept())))
    assert print_program(parse(print_program(program))) == print_program(program)
    assert_expected_inline(
        _actions(program),
        """\
action 0F:
  first wait refresh a
  run F a
  first wait refresh b
  run F b
action 0B:
  run B b
  run B a
action 0REDUCE_GRAD:
  last start bucket all: reduce_scatter(f32[32] over dp)  # 64 B
  last wait bucket all
action 0REFRESH:
  start refresh a: all_gather(f32[8] over dp)  # 32 B
  start refresh b: all_gather(f32[8] over dp)  # 32 B
action 0END:
  start result loss: all_reduce(f32[] over dp)  # 4 B
  wait result loss
  run update
schedule 0: 0F0 0B0 0F1 0B1 0REDUCE_GRAD""",
    )


@pytest.mark.parametrize(
    ("levels", "prefetched", "expected"),
    [
        (False, False, "start a, wait a, start b, wait b, F a, F b"),
        (False, True, "start a, start b, wait a, F a, wait b, F b"),
        # the second level of a gather, inside nodes, starts one call ahead
        (True, True, "start a, start b, advance a, wait a, advance b, F a, wait b, F b"),
    ],
)
def test_the_first_forward_pass_alone_waits_for_updated_parameters(
    levels: bool, prefetched: bool, expected: str
) -> None:
    program = actions(parse(_kept(levels)))
    steps = Execution(prefetch(program) if prefetched else program, 0).step()
    log = [_said(each) for _, found in steps for each in found if _runs(each) or each.statement.subject == "refresh"]
    assert ", ".join(log) == f"{expected}, B b, B a, F a, F b, B b, B a"
    accumulating = Execution(program, 0).step(updates=False)
    assert not any(each.statement.subject == "refresh" for _, found in accumulating for each in found)


def test_an_action_that_gathers_nothing_ahead_has_its_gathers_before_the_next() -> None:
    program = prefetch(actions(parse(_GATHERS)), late=frozenset(["0F"]))
    assert _actions(program).splitlines()[-1] == (
        "schedule 0: 0UNSHARD>0F 0F0 0UNSHARD>0B 0B0>0F 0F1 0UNSHARD>0B 0B1 0REDUCE_GRAD"
    )
    assert _started(program) == ["UNSHARD: a", "F: b", "UNSHARD: b", "B: a", "F: b", "UNSHARD: b"]


def test_without_the_pass_everything_is_waited_for_at_once() -> None:
    program = actions(parse(_GATHERS))
    assert _started(program) == ["F: a", "F: b", "B: b", "F: a", "F: b", "B: b"]


@pytest.mark.parametrize(
    ("given", "line", "fault"),
    [
        (_GATHERS, "  wait gather b\n", "reads its parameters before they are gathered"),
        (_GATHERS, "  free gather b\n  wait scatter", "gathered again before they are freed"),
        (_GATHERS, "  wait scatter b\n", "scatter b starts again before it was waited for"),
        (_kept(), "  first wait refresh b\n", "b reads its parameters before they are gathered"),
    ],
    ids=["gather", "free", "scatter", "refresh"],
)
def test_a_missing_wait_or_free_is_found(given: str, line: str, fault: str) -> None:
    text = print_program(prefetch(actions(parse(given))))
    first = text.index(line)
    broken = parse(text[:first] + text[first + line.index("\n") + 1 :])
    with pytest.raises(InternalError, match=fault):
        list(Execution(broken, 0).step())


def _started(program: Program) -> list[str]:
    """The gathers of a step, with the actions in which they start."""
    return [
        f"{action.kind if isinstance(action, Action) else action}: {each.statement.of}"
        for action, steps in Execution(program, 0).step()
        for each in steps
        if (each.statement.verb, each.statement.subject) == ("start", "gather")
    ]


def _runs(step: StatementRun) -> bool:
    return step.statement.subject in ("F", "B", "I", "W")


def _said(step: StatementRun) -> str:
    """`F a`, or `start a` for an exchange."""
    each = step.statement
    return f"{each.subject if _runs(step) else each.verb} {each.of}"


def _actions(program: Program) -> str:
    text = print_program(program)
    return text[text.index("action ") : text.index("\n\nregion")]


def test_a_unit_gathers_once_until_it_is_freed() -> None:
    shards = {"w": Shard("f64[4@dp]", gather=("dp",))}

    def work(comm: VirtualComm) -> None:
        unit = Parts(comm, shards, {"w": torch.full((2,), 7.0, dtype=torch.float64)}, {}).unit(Fields, "w")
        unit.gather()
        unit.gather()  # moves nothing
        unit.wait()
        unit.free()
        unit.wait()
        assert unit.whole.w.tolist() == [7.0] * 4
        unit.free()
        assert not hasattr(unit, "whole")
        unit.gather()
        unit.wait()
        assert unit.whole.w.tolist() == [7.0] * 4

    _world(work)


def test_gathers_cross_nodes_two_calls_ahead_and_go_around_inside_one() -> None:
    text = _over_nodes(_GATHERS)
    steps = Execution(prefetch(actions(parse(text))), 0).step()
    log = [
        _said(each) if _runs(each) else f"{each.statement.of} over {each.collectives[0].group}"
        for _, found in steps
        for each in found
        if _runs(each) or (each.statement.subject == "gather" and each.collectives)
    ]
    assert log[:9] == [
        "a over dp_out", "b over dp_out", "a over dp_in", "b over dp_in", "F a", "a over dp_out", "F b", "a over dp_in",
        "B b",
    ]  # fmt: skip


def test_a_program_that_was_compared_with_others_is_not_rehearsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[object] = []
    courses = Rehearsal.courses
    monkeypatch.setattr(Rehearsal, "courses", lambda self, **how: played.append(self) or courses(self, **how))
    package = partc.compile(EXAMPLES / "gpt.py", mesh="2", zero=3, microbatches=2)
    assert len(played) == 1  # no peak is where something is gathered ahead
    assert package.memory == rehearse(package.program) and len(played) == 2


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mesh", "options", "some"),
    [("2", {"microbatches": 2}, False), ("4x2x1", {"microbatches": 8}, True)],
)
def test_what_is_gathered_ahead_raises_no_peak(mesh: str, options: dict[str, Any], some: bool) -> None:
    """All of it would, where `some` is left out: an embedding's gradient is there with what the next action reads."""
    package = partc.compile(EXAMPLES / "gpt.py", mesh=mesh, zero=3, **options).program
    rows = tuple(tuple(replace(each, ahead=()) for each in row if each.kind != "UNSHARD") for row in package.schedule)
    written = actions(replace(package, schedule=rows))
    every = frozenset(f"{each.stage}{each.kind}" for row in package.schedule for each in row if each.kind in ("F", "B"))
    chosen = late_actions(written).names
    all_late, early, all_early = (prefetch(written, late=names) for names in (every, chosen, frozenset[str]()))
    assert early == package
    peaks = [[rank.peak for rank in rehearse(program).ranks] for program in (all_late, early, all_early)]
    assert all(one <= other for one, other in zip(peaks[1], peaks[0], strict=True))
    assert bool(chosen) == some
    assert any(one > other for one, other in zip(peaks[2], peaks[0], strict=True)) == some
    gathers = [
        sum(isinstance(each, Entered) and each.op == "all_gather" for row in events(program).places for each in row)
        for program in (all_early, early, all_late)
    ]
    assert gathers[0] <= gathers[1] < gathers[2]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("2x2x2", {"bucket": "20KB", "microbatches": 4}),
        ("2x2x1", {"bucket": "0B", "zero": 1, "schedule": "zbv", "microbatches": 4}),
        ("1x2x2", {"zero": 3, "recompute": "full", "microbatches": 2}),
    ],
)
def test_packages_that_overlap_train_the_same(mesh: str, options: dict[str, Any], tmp_path: Path) -> None:
    package = partc.compile(EXAMPLES / "gpt.py", mesh=mesh, precision="fp64", **options)
    package.write(tmp_path / "build")
    result = verify(tmp_path / "build", virtual=True, steps=2)
    assert result.ok, result.worst
