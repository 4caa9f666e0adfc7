"""Schedules against torch's own classes, their definitions, and figures of their papers."""

from __future__ import annotations

import itertools

import pytest

from partc.errors import PartcError
from partc.schedules import SCHEDULES, Compute, ScheduleKind, compute_order, stage_ranks
from tests.torch_schedules import computed

RANKS = (1, 2, 3, 4, 6, 8)
MICROBATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 16, 17, 24, 32)


def _each(kind: ScheduleKind) -> tuple[int, ...]:
    return (1, 2, 3, 4) if kind.placement == "loop" else (kind.stages_per_rank,)


KINDS = [(name, each) for name, kind in SCHEDULES.items() for each in _each(kind)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "each"), KINDS)
def test_torch_computes_the_same(name: str, each: int, ranks: int) -> None:
    compared = 0
    for microbatches in MICROBATCHES:
        theirs = computed(name, ranks, each, microbatches)
        if theirs is not None:
            mine = compute_order(SCHEDULES[name], ranks, microbatches, ranks * each)
            assert tuple(tuple(map(str, line)) for line in mine) == theirs
            compared += 1
    assert compared >= 4


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "each"), KINDS)
def test_everything_is_computed_once_on_its_rank_and_in_time(name: str, each: int, ranks: int) -> None:
    """Also where torch takes no such number of microbatches."""
    kind = SCHEDULES[name]
    places = stage_ranks(kind, ranks, ranks * each)
    for microbatches in MICROBATCHES:
        order = compute_order(kind, ranks, microbatches, ranks * each)
        assert all(places[compute.stage] == rank for rank, line in enumerate(order) for compute in line)
        done = _played(order, ranks * each)
        assert len(done) == len(set(done))
        for stage, microbatch in itertools.product(range(ranks * each), range(microbatches)):
            kinds = "".join(item.kind for item in done if (item.stage, item.microbatch) == (stage, microbatch))
            assert kinds in ("FB", "FIW") if kind.split_backward else kinds == "FB"
        assert len(done) == sum(map(len, order)), f"{name} waits forever: {ranks} ranks, {microbatches} microbatches"


def _played(order: tuple[tuple[Compute, ...], ...], stages: int) -> list[Compute]:
    """Run all ranks until none can go on: a forward needs the stage before, a backward the stage after."""
    done: list[Compute] = []
    known: set[tuple[int, str, int]] = set()
    left = [list(line) for line in order]
    while moved := [line for line in left if line and _needs(line[0], stages) <= known]:
        for line in moved:
            done.append(line.pop(0))
            known.add((done[-1].stage, "B" if done[-1].kind == "I" else done[-1].kind, done[-1].microbatch))
    return done


def _needs(compute: Compute, stages: int) -> set[tuple[int, str, int]]:
    stage, index = compute.stage, compute.microbatch
    if compute.kind == "F":
        return {(stage - 1, "F", index)} if stage else set()
    if compute.kind == "W":
        return {(stage, "B", index)}
    return {(stage, "F", index)} | ({(stage + 1, "B", index)} if stage < stages - 1 else set())


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 6), (4, 4), (4, 12), (5, 3)])
def test_1f1b_keeps_as_many_microbatches_as_stages_follow(ranks: int, microbatches: int) -> None:
    """Narayanan et al. 2021, section 2.2.1: at most p - i in flight on stage i, whatever m; GPipe keeps all m."""
    for rank in range(ranks):
        for name, most in (("1f1b", min(microbatches, ranks - rank)), ("gpipe", microbatches)):
            line = compute_order(SCHEDULES[name], ranks, microbatches, ranks)[rank]
            assert max(itertools.accumulate(1 if item.kind == "F" else -1 for item in line)) == most


@pytest.mark.parametrize(
    ("name", "placed"),
    [("gpipe", (0, 1, 2)), ("interleaved", (0, 1, 2, 0, 1, 2)), ("zbv", (0, 1, 2, 2, 1, 0))],
)
def test_where_stages_stand(name: str, placed: tuple[int, ...]) -> None:
    assert stage_ranks(SCHEDULES[name], 3, len(placed)) == placed


@pytest.mark.parametrize(
    ("name", "stages"),
    [("gpipe", 8), ("1f1b", 3), ("zbv", 4), ("dualpipe-v", 12), ("interleaved", 7), ("zero-bubble", 0)],
)
def test_stages_that_a_schedule_cannot_place(name: str, stages: int) -> None:
    with pytest.raises(PartcError) as failure:
        compute_order(SCHEDULES[name], 4, 8, stages)
    assert failure.value.code == "P0406"
    assert f"{stages} stages on 4 pipeline ranks" in failure.value.cause
