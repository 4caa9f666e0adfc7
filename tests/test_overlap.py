"""Communication while ranks compute: collectives apart from their waits, buckets of gradients, gathers one call ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import partc
from partc.events import Collective, events
from partc.mesh import Mesh
from partc.parser import parse
from partc.passes.bucket import bucket
from partc.passes.overlap import overlap
from partc.printer import print_program, print_region
from partc.program import MOVING
from partc.rehearsal import rehearse
from partc.runtime.layout import Shard
from partc.runtime.parts import Parts, ahead
from partc.runtime.sums import Bucket, Sums
from partc.runtime.virtual import VirtualComm, World
from partc.verifier import verify_program
from partc.verify import verify

EXAMPLES = Path(__file__).parents[1] / "examples"

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
    grad_h_coming  = all_reduce(grad_h_partial, axis="tp")  # f32[4096@dp, 2048]
    grad_second.w  = linear_grad_weight(grad_y, h)          # f32[2048@tp, 2048] partial(dp)
    grad_second.b  = sum(grad_h_partial, (0,), False)       # f32[2048] partial(dp,tp)
    grad_h         = wait(grad_h_coming)                    # f32[4096@dp, 2048]
    return grad_h, grad_second.w, grad_second.b
""",
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
            elif op.name in MOVING and op.result.name.endswith("_coming"):
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
    assert {parameter.name: parameter.after for parameter in done.parameters} == after
    assert print_program(parse(print_program(done))) == print_program(done)


def _world(work: Any, size: int = 2) -> None:
    world = World(size)
    groups = {"dp": tuple(range(size))}
    world.run(lambda rank: work(VirtualComm(world=world, rank=rank, coordinate={"dp": rank}, groups=groups, links={})))


def test_sums_start_after_the_last_microbatch_alone() -> None:
    shards = {name: Shard("f64[3]", reduce=("dp",)) for name in ("a", "b", "c")}
    buckets = (
        Bucket(after="late", over=("dp",), first="b", last="c"),
        Bucket(after="soon", over=("dp",), names=("a",)),
    )

    def work(comm: VirtualComm) -> None:
        memory = torch.full((9,), float(comm.group(("dp",)).rank + 1), dtype=torch.float64)
        gradients = dict(zip(shards, memory.split(3), strict=True))
        sums = Sums(comm, shards, gradients, buckets)
        comm.last = False
        sums.start("late")
        sums.finish()
        assert memory.unique().numel() == 1
        comm.last = True
        sums.start("late")
        gradients["a"].add_(10)  # the call before it still adds to its own
        sums.start("soon")
        sums.finish()
        assert gradients["a"].tolist() == [23.0] * 3
        assert gradients["b"].tolist() == gradients["c"].tolist() == [3.0] * 3

    _world(work)


def test_what_is_on_its_way_must_not_change() -> None:
    def work(comm: VirtualComm) -> None:
        x = torch.ones(4)
        going = comm.group(("dp",)).start_all_reduce_(x)
        x[0] += 1
        going.wait()

    with pytest.raises(RuntimeError, match=r"all_reduce sum of float32\[4\] over dp has changed on its way"):
        _world(work)


class Fields(NamedTuple):
    w: Tensor


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("0 1 2", "start 0, compute nothing, start 1, compute 0, start 2, compute 1, compute 2"),
        ("0 1 1 0", "start 0, compute nothing, start 1, compute 0, compute 1, start 0, compute 1, compute 0"),
        (
            "0 1 - 1 2",
            "start 0, compute nothing, start 1, compute 0, compute 1, start 1, start 2, compute 1, compute 2",
        ),
        ("- -", "compute nothing"),
    ],
)
def test_gathers_start_one_call_ahead(line: str, expected: str) -> None:
    """Whatever action a call is of. What is read twice in a row is gathered once; nothing goes ahead past None."""
    shards = {f"{i}.w": Shard("f64[4@dp]", gather=("dp",)) for i in range(3)}

    def work(comm: VirtualComm) -> None:
        held = {name: torch.full((2,), float(i), dtype=torch.float64) for i, name in enumerate(shards)}
        parts = Parts(comm, shards, held, {})
        log: list[str] = []

        class Logged:
            def __init__(self, name: str) -> None:
                self.name, self.unit, self.turns = name, parts.unit(Fields, name), parts.turns

            def gather(self) -> Any:
                log.append(f"start {self.name[0]}")
                return self.unit.gather()

        units: dict[str, Any] = {name[0]: Logged(name) for name in shards} | {"-": None}
        whole: Iterator[Fields] = ahead(*(units[name] for name in line.split()))
        log.append("compute nothing")
        for name in line.replace("-", "").split():
            fields = next(whole)
            log.append(f"compute {name}")
            assert fields.w.tolist() == [float(name)] * 4
        assert ", ".join(log) == expected

    _world(work)


def test_gathers_cross_nodes_two_calls_ahead_and_go_around_inside_one() -> None:
    shards = {f"{i}.w": Shard("f64[4@dp_out,dp_in]", gather=("dp_out", "dp_in")) for i in range(3)}
    mesh = Mesh((("dp_out", 2), ("dp_in", 2)))
    groups = [("dp_out",), ("dp_in",)]
    world = World(4)

    def work(rank: int) -> None:
        members = {",".join(axes): mesh.group(rank, axes) for axes in groups}
        comm = VirtualComm(world=world, rank=rank, coordinate=mesh.coordinate(rank), groups=members, links={})
        held = {name: torch.full((1,), float(rank), dtype=torch.float64) for name in shards}
        parts = Parts(comm, shards, held, {}, near=("dp_in",))
        log: list[str] = []
        for name in ("dp_out", "dp_in"):
            axis = comm.group((name,))
            start = axis.start_all_gather
            axis.start_all_gather = lambda *args, name=name, start=start, **named: (  # type: ignore[method-assign]
                log.append(name) or start(*args, **named)
            )
        for fields in ahead(*(parts.unit(Fields, name) for name in shards)):
            assert fields.w.tolist() == [0.0, 1.0, 2.0, 3.0]
            log.append("compute")
        out, near, compute = "dp_out", "dp_in", "compute"
        assert log == [out, out, near, near, out, compute, near, compute, compute]

    world.run(work)
    assert not any(group.meetings for group in world.groups.values())


@pytest.mark.parametrize(
    ("mesh", "options", "some"),
    [("2", {"microbatches": 2}, False), ("4x2x1", {"microbatches": 8}, True)],
)
def test_what_is_gathered_ahead_raises_no_peak(mesh: str, options: dict[str, Any], some: bool) -> None:
    """All of it would, where `some` is left out: an embedding's gradient is there with what the next action reads."""
    program = partc.compile(EXAMPLES / "gpt.py", mesh=mesh, zero=3, **options).program
    kinds = dict.fromkeys(f"{each.stage}{each.kind}" for row in program.schedule for each in row)
    every = tuple(name for name in kinds if name[1:] in ("F", "B"))
    late, early, all_early = (
        [rank.peak for rank in rehearse(replace(program, early=names)).ranks] for names in ((), program.early, every)
    )
    assert all(one <= other for one, other in zip(early, late, strict=True))
    assert (set(program.early) < set(every)) == some
    assert any(one > other for one, other in zip(all_early, late, strict=True)) == some
    gathers = lambda names: sum(  # noqa: E731
        isinstance(event, Collective) and event.op == "all_gather"
        for row in events(replace(program, early=names)).places
        for event in row
    )
    assert gathers(every) <= gathers(program.early) < gathers(())


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
