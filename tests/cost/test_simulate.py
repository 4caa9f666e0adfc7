"""The simulator against an independent longest path, and schedules against figures of their papers."""

from __future__ import annotations

import itertools
import random
import weakref
from functools import cache
from typing import Any

import pytest

from partc.cost.simulation import Durations, Timeline, chain, in_order, simulate
from partc.ir.program import Action
from partc.runtime.comm.comm import Comm
from partc.runtime.execution.executor import parse_schedule, run_step
from partc.runtime.execution.stage import PipelineStage
from partc.schedules import SCHEDULES, Compute, compute_order, stage_ranks

COUNTS = [(2, 2), (2, 8), (3, 7), (4, 4), (4, 8), (4, 16), (8, 16), (8, 32)]  # ranks, microbatches


def play(name: str, ranks: int, microbatches: int, each: int | None = None, **durations: float) -> Timeline:
    kind = SCHEDULES[name]
    stages = ranks * (each or kind.stages_per_rank)
    order = compute_order(kind, ranks, microbatches, stages)
    found = simulate(order, stage_ranks(kind, ranks, stages), durations=Durations(**durations))
    assert not found.stuck
    return found


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), COUNTS)
def test_gpipe_and_1f1b_are_idle_as_published(name: str, ranks: int, microbatches: int) -> None:
    """(p - 1) / (m + p - 1): Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.1."""
    assert play(name, ranks, microbatches).bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize("each", [1, 2, 3, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 8), (4, 4), (4, 8), (4, 16), (8, 32)])
def test_interleaving_divides_the_idle_time(each: int, ranks: int, microbatches: int) -> None:
    """Bubble / ideal time = (p - 1) / (v m): Narayanan et al. 2021, section 2.2.2, for multiples of p."""
    found = play("interleaved", ranks, microbatches, each)
    ideal = 3 * each * microbatches
    assert (found.makespan - ideal) / ideal == pytest.approx((ranks - 1) / (each * microbatches))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 8), (3, 7), (4, 8), (4, 16), (8, 16), (8, 32)])
def test_zb_h1_leaves_a_third_of_1f1bs_idle_time(ranks: int, microbatches: int) -> None:
    """(p - 1)(F + I - W) of (p - 1)(F + I + W): Qi et al. 2023, section 2.3, table 2; the same peak memory."""
    ideal = 3 * microbatches
    mine, theirs = play("zero-bubble", ranks, microbatches), play("1f1b", ranks, microbatches)
    assert mine.makespan - ideal == pytest.approx((theirs.makespan - ideal) / 3)
    assert max(mine.in_flight) == max(theirs.in_flight)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (2, 8), (3, 7), (4, 8), (4, 16), (8, 15), (8, 32)])
def test_zb_v_is_never_idle_once_it_runs(ranks: int, microbatches: int) -> None:
    """No bubble from a rank's first computation to its last, where F = I = W and there are 2 p - 1 microbatches.

    The cost is the longest execution of any rank; activations of p microbatches: Qi et al. 2023, sections 5 and 6.
    """
    found = play("zbv", ranks, microbatches)
    assert [line[-1].end - line[0].start for line in found.ranks] == [6 * microbatches] * ranks
    assert found.in_flight == (2 * ranks,) * ranks


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 7), (4, 8), (4, 16), (8, 16), (8, 32)])
@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1, 1, 1), (1, 1.5, 1), (1, 1.2, 0.8), (2, 2, 1)])
def test_dualpipe_v_is_no_more_idle_than_published(
    ranks: int, microbatches: int, forward: float, inputs: float, weights: float
) -> None:
    """At most (P/2 - 1)(F&B + B - 3 W), and P + 1 activations of stages, with P = 2 p stages: DualPipe's README.

    F&B is a forward and a backward that run side by side; here they run one after the other, F + B.
    """
    whole = inputs + weights
    found = play("dualpipe-v", ranks, microbatches, forward=forward, inputs=inputs, weights=weights, backward=whole)
    ideal = 2 * microbatches * (forward + whole)
    assert found.makespan - ideal <= (ranks - 1) * (forward + whole + whole - 3 * weights) + 1e-9
    assert found.in_flight == (2 * ranks + 1,) * ranks
    one = play("1f1b", ranks, microbatches, forward=2 * forward, backward=2 * whole)
    assert found.makespan < one.makespan


@pytest.mark.parametrize(("ranks", "microbatches"), COUNTS)
def test_activations_in_flight(ranks: int, microbatches: int) -> None:
    """1F1B keeps p - r on rank r, GPipe all; interleaving v stages keeps p (v - 1) + 2 (p - 1 - r) + 1 of them."""
    assert play("gpipe", ranks, microbatches).in_flight == (microbatches,) * ranks
    assert play("1f1b", ranks, microbatches).in_flight == tuple(min(ranks - r, microbatches) for r in range(ranks))
    if microbatches % ranks == 0:
        for each in (2, 3):
            most = tuple(min(ranks * (each - 1) + 2 * (ranks - 1 - r) + 1, each * microbatches) for r in range(ranks))
            assert play("interleaved", ranks, microbatches, each).in_flight == most


@pytest.mark.parametrize("transfer", [0.0, 0.25, 1.0])
def test_gpipe_waits_for_each_hop_once_in_each_direction(transfer: float) -> None:
    found = play("gpipe", 4, 6, transfer=transfer)
    assert found.makespan == pytest.approx((6 + 3) * 3 + 2 * 3 * transfer)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_computation_starts_at_its_longest_path(name: str, seed: int) -> None:
    """Random durations for every stage, random links; each start worked out backwards, by recursion."""
    rng = random.Random(seed)
    kind = SCHEDULES[name]
    ranks, microbatches = rng.randint(1, 5), rng.randint(1, 9)
    stages = ranks * (rng.randint(1, 3) if kind.placement == "loop" else kind.stages_per_rank)
    order, places = compute_order(kind, ranks, microbatches, stages), stage_ranks(kind, ranks, stages)
    each = [
        Durations(forward=rng.random(), backward=rng.random(), inputs=rng.random(), weights=rng.random(), transfer=rng.random())
        for _ in places
    ]  # fmt: skip
    skips = {(a, b, rng.random() < 0.5) for a in range(stages) for b in range(a + 2, stages) if rng.random() < 0.3}
    links = [*chain(stages), *skips]
    found = simulate(order, places, durations=each, links=links)
    before = {b: a for line in order for a, b in itertools.pairwise(line)}
    backward = {(item.stage, item.microbatch): item for line in order for item in line if item.kind in "BI"}

    @cache
    def end(item: Compute) -> float:
        return start(item) + each[item.stage].of(item.kind)

    def start(item: Compute) -> float:
        times = [0.0] + ([end(before[item])] if item in before else [])
        for source, target, gradient in links:
            far = places[source] != places[target]
            if item.kind == "F" and target == item.stage:
                times.append(end(Compute(source, "F", item.microbatch)) + far * each[source].transfer)
            if item.kind in "BI" and gradient and source == item.stage:
                times.append(end(backward[target, item.microbatch]) + far * each[target].transfer)
        return max(times)

    assert not found.stuck
    for line in found.ranks:
        for span in line:
            assert (span.start, span.end) == pytest.approx((start(span.compute), end(span.compute)))

    ends: list[float] = []
    clocks = [0.0] * ranks
    for step in in_order(order, places, links):
        arrivals = [ends[at] + (0.0 if source is None else each[source].transfer) for at, source in step.reads]
        clocks[step.rank] = max(clocks[step.rank], *arrivals, 0.0) + each[step.stage].of(step.kind)
        ends.append(clocks[step.rank])
    assert sorted(ends) == sorted(span.end for line in found.ranks for span in line)


class _Activations:
    """The saved values of a stage's forward pass: alive while anything refers to them."""


class _Stage(PipelineStage):
    """A stage that computes nothing and counts the activations that are alive."""

    def __init__(self, alive: weakref.WeakSet[_Activations], peak: list[int]) -> None:
        self.alive, self.peak = alive, peak

    def forward(self, batch: object, received: object) -> tuple[dict[str, Any], _Activations]:
        made = _Activations()
        self.alive.add(made)
        self.peak[0] = max(self.peak[0], len(self.alive))
        return {}, made

    def backward(self, saved: _Activations, gradients: object, last: bool) -> dict[str, Any]:
        assert saved in self.alive
        return {}

    def backward_input(self, saved: _Activations, gradients: object) -> tuple[dict[str, Any], _Activations]:
        return {}, saved

    def backward_weight(self, kept: _Activations, last: bool) -> None:
        assert kept in self.alive


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("ranks", "microbatches"), COUNTS)
def test_the_runtime_holds_what_is_predicted(name: str, ranks: int, microbatches: int) -> None:
    """Run by the executor of emitted packages, which lets go of activations where it can."""
    kind = SCHEDULES[name]
    order = compute_order(kind, ranks, microbatches, ranks * kind.stages_per_rank)
    for row, predicted in zip(order, play(name, ranks, microbatches).in_flight, strict=True):
        alive: weakref.WeakSet[_Activations] = weakref.WeakSet()
        peak = [0]
        stages: Any = {stage: _Stage(alive, peak) for stage in sorted({compute.stage for compute in row})}
        comm = Comm({}, {})
        run_step(stages, comm, parse_schedule(" ".join(map(str, row))), {}, [{}] * microbatches)
        assert peak == [predicted]
        assert not alive


def _row(text: str) -> list[Any]:
    kinds = ("SEND_F", "SEND_B", "RECV_F", "RECV_B", "F", "B", "I", "W")
    found = []
    for word in text.split():
        kind = next(kind for kind in kinds if kind in word)
        found.append(Action(stage=int(word.split(kind)[0]), kind=kind, microbatch=int(word.split(kind)[1])))
    return found


def test_a_send_that_comes_late_makes_others_wait() -> None:
    at_once = simulate([_row("0F0 0SEND_F0 0F1 0B0 0B1"), _row("1F0 1B0 1F1 1B1")], (0, 1))
    late = simulate([_row("0F0 0F1 0SEND_F0 0B0 0B1"), _row("1F0 1B0 1F1 1B1")], (0, 1))
    assert [line[0].start for line in at_once.ranks] == [0.0, 1.0]
    assert [line[0].start for line in late.ranks] == [0.0, 2.0]


def test_a_transfer_begins_when_both_ends_are_ready() -> None:
    """Values that are received early arrive during other computations."""
    slow = Durations(transfer=1.0)
    early = simulate([_row("0F0 0SEND_F0 0F1 0SEND_F1"), _row("1RECV_F0 1RECV_F1 1F0 1F1")], (0, 1), durations=slow)
    late = simulate([_row("0F0 0SEND_F0 0F1 0SEND_F1"), _row("1RECV_F0 1F0 1RECV_F1 1F1")], (0, 1), durations=slow)
    assert [span.start for span in early.ranks[1]] == [2.0, 3.0]
    assert [span.start for span in late.ranks[1]] == [2.0, 4.0]


def test_a_receive_waits_for_nothing() -> None:
    found = simulate([_row("0RECV_B0 0F0 0B0"), _row("1F0 1B0")], (0, 1))
    assert not found.stuck and found.makespan == simulate([_row("0F0 0B0"), _row("1F0 1B0")], (0, 1)).makespan


def test_what_cannot_go_on_is_named() -> None:
    assert simulate([_row("0F0 0B0 0F1 0B1"), _row("1F1 1F0 1B0 1B1")], (0, 1)).stuck == ((0, 1), (1, 0))
    assert simulate([_row("0W0 0F0 0I0")], (0,)).stuck == ((0, 0),)
    assert simulate([_row("0B0 0F0")], (0,)).stuck == ((0, 0),)
    assert simulate([_row("0SEND_F0 0F0 0B0")], (0,)).stuck == ((0, 0),)
