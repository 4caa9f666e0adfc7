"""The schedule pass: transfers around computations, in programs whose values skip stages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import partc
from partc.errors import InternalError, PartcError
from partc.ir.program import Program
from partc.passes.actions import actions
from partc.passes.check import check
from partc.passes.schedule import schedule
from partc.schedules import SCHEDULES, Compute
from partc.schedules.table import Table

CROSSING = Path(__file__).parents[1] / "models" / "crossing.py"


def compiled(mesh: str, microbatches: int, kind: str) -> Program:
    package = partc.compile(CROSSING, mesh=mesh, microbatches=microbatches, schedule=kind)
    assert any(transfer.target - transfer.source > 1 for transfer in package.program.transfers)
    return package.program


@pytest.fixture(scope="module")
def looped() -> Program:
    """Six stages on two ranks, whose backward passes are split."""
    program = partc.compile(CROSSING, mesh="pp=2", microbatches=4, schedule="zero-bubble", virtual_stages=3).program
    assert program.places == (0, 1, 0, 1, 0, 1)
    return program


@pytest.mark.parametrize("kind", SCHEDULES)
def test_what_stays_on_a_rank_is_not_sent(kind: str) -> None:
    program = compiled("pp=3", 4, kind)
    travelling = [item for item in program.transfers if program.travels(item)]
    for row in program.schedule:
        for action in row:
            found = {
                "SEND_F": [item for item in travelling if item.source == action.stage],
                "RECV_F": [item for item in travelling if item.target == action.stage],
                "SEND_B": [item for item in travelling if item.target == action.stage and item.gradient],
                "RECV_B": [item for item in travelling if item.source == action.stage and item.gradient],
            }.get(action.kind)
            assert found is None or found


def test_two_values_between_two_stages_arrive_as_they_are_sent() -> None:
    """Also where one of them goes to a third stage as well; an order in which they don't is found by the check."""
    program = compiled("pp=4", 2, "1f1b")
    both = [item for item in program.transfers if (item.source, item.target) == (1, 3)]
    shared = [item for item in both if any(o.value == item.value and o.target == 2 for o in program.transfers)]
    alone = [item for item in both if item not in shared]
    assert shared and alone
    others = [item for item in program.transfers if item not in both]
    with pytest.raises(InternalError, match="sent next"):
        check(actions(replace(program, transfers=(*others, *alone, *shared))))


def random_rows(
    places: Sequence[int], count: int, rng: random.Random, *, in_order: bool
) -> tuple[tuple[Compute, ...], ...]:
    """Ranks take turns; each does anything that is ready, of `count` microbatches of the stages at `places`."""
    stages = len(places)
    halves = {(stage, index): rng.random() < 0.5 for stage in range(stages) for index in range(count)}
    left = {Compute(stage, "F", index) for stage in range(stages) for index in range(count)}
    for (stage, index), apart in halves.items():
        left |= {Compute(stage, kind, index) for kind in (("I", "W") if apart else ("B",))}  # type: ignore[arg-type]
    done: set[tuple[int, str, int]] = set()
    rows: list[list[Compute]] = [[] for _ in range(1 + max(places))]

    def ready(item: Compute) -> bool:
        stage, kind, index = item.stage, item.kind, item.microbatch
        if in_order and kind != "W" and index and (stage, "B" if kind == "I" else kind, index - 1) not in done:
            return False
        if kind == "F":
            return stage == 0 or (stage - 1, "F", index) in done
        if kind == "W":
            return (stage, "B", index) in done
        return (stage, "F", index) in done and (stage == stages - 1 or (stage + 1, "B", index) in done)

    while left:
        rank = rng.randrange(len(rows))
        choices = [item for item in left if places[item.stage] == rank and ready(item)]
        if choices:
            item = rng.choice(sorted(choices, key=str))
            left.remove(item)
            rows[rank].append(item)
            done.add((item.stage, "B" if item.kind == "I" else item.kind, item.microbatch))
    return tuple(map(tuple, rows))


@pytest.mark.parametrize("seed", range(60))
def test_any_order_that_can_run_is_proved(looped: Program, seed: int) -> None:
    """Rows of random play, with the backward passes of some microbatches apart."""
    rows = random_rows(looped.places, 4, random.Random(seed), in_order=True)
    check(actions(schedule(looped, table=Table(file="any.csv", text="", rows=rows, places=looped.places))))


@pytest.mark.parametrize("seed", range(40))
def test_orders_that_differ_from_stage_to_stage(looped: Program, seed: int) -> None:
    """Receives follow the sends: on two ranks, every stage has one source on the other rank."""
    rows = random_rows(looped.places, 4, random.Random(seed), in_order=False)
    check(actions(schedule(looped, table=Table(file="any.csv", text="", rows=rows, places=looped.places))))


@pytest.mark.parametrize("seed", range(40))
def test_a_chain_takes_every_order(looped: Program, seed: int) -> None:
    """Without skips a stage has one source each way, whatever its order."""
    chain = replace(looped, transfers=tuple(t for t in looped.transfers if t.target - t.source == 1))
    rows = random_rows(chain.places, 4, random.Random(seed), in_order=False)
    check(actions(schedule(chain, table=Table(file="any.csv", text="", rows=rows, places=looped.places))))


@pytest.mark.slow
def test_two_sources_in_different_orders_are_an_error_of_the_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n2F0,2F1,2B0,2B1\n")
    with pytest.raises(PartcError) as failure:
        partc.compile(CROSSING, mesh="pp=3", microbatches=2, schedule=str(path))
    assert failure.value.code == "P0411"
    assert failure.value.cause == "stage 2 reads from stages 0 and 1, whose orders of microbatches differ"


def test_backward_passes_of_a_stage_are_all_whole_or_all_in_halves() -> None:
    """Also if no gradients of weights are left for the second halves, and the schedule runs both kinds."""
    program = compiled("pp=3", 2, "gpipe")
    whole = replace(program, regions=tuple(replace(region, weight=None) for region in program.regions))
    orders = ("F0 F1 B0 I1 W1", "F0 F1 B0 B1", "F0 F1 I0 W0 B1")
    rows = tuple(
        tuple(Compute(stage, word[0], int(word[1])) for word in order.split())  # type: ignore[arg-type]
        for stage, order in enumerate(orders)
    )
    found = schedule(whole, table=Table(file="mixed.csv", text="", rows=rows, places=(0, 1, 2)))
    assert [found.kinds(stage) & {"B", "I", "W"} for stage in range(3)] == [{"I", "W"}, {"B"}, {"I", "W"}]
