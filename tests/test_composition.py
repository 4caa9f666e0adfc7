"""Composed steps equal played ones: peaks, positions, contents and courses, to the byte."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from partc.api import compilation
from partc.compilation.options import Options
from partc.ir.program import Action, Program
from partc.rehearsal.composition import Course
from partc.rehearsal.rehearsal import rehearsed
from partc.schedules import SCHEDULES
from tests.test_architecture import ROOT

GPT = str(ROOT / "examples" / "gpt.py")


def compiled(model: str = GPT, **given: Any) -> Program:
    options: dict[str, Any] = {"mesh": "4x2x2", "precision": "fp32", "schedule": "1f1b", "seed": 0, "shard": ()}
    checked = Options.checked(**{**options, "microbatches": 24, **given})
    return compilation(model, None, checked, model_options={"batch": str(8 * checked.microbatches)}).program


def expect_equal(program: Program, *, composed: bool = True) -> None:
    found, courses = rehearsed(program)
    expected, ledgers = rehearsed(program, whole=True)
    assert found == expected
    assert any(isinstance(course, Course) for course in courses) or not composed
    for course, ledger in zip(courses, ledgers, strict=True):
        assert course.peak == ledger.peak
        assert course.peaks == ledger.peaks
        assert list(course.kinds()) == list(ledger.kinds())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_every_schedule(schedule: str) -> None:
    zero = 3 if SCHEDULES[schedule].stages_per_rank == 1 else 1
    stages = SCHEDULES[schedule].stages_per_rank
    expect_equal(compiled(schedule=schedule, zero=zero, mesh="4x2x2" if stages == 1 else "2x2x2"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_options(seed: int) -> None:
    draw = random.Random(seed)
    schedule = draw.choice(list(SCHEDULES))
    ranks = draw.choice([1, 2, 4] if SCHEDULES[schedule].stages_per_rank == 1 else [1, 2])
    program = compiled(
        schedule=schedule,
        mesh=f"pp={ranks},dp_out=2,dp_in=2,tp={draw.choice([1, 2])}",
        microbatches=draw.choice([7, 13, 24, 33]) if schedule != "dualpipe-v" else 24,
        zero=draw.choice(["1", "2", "3", "3@dp_in"]),
        recompute=draw.choice(["none", "selective", "full"]),
        precision=draw.choice(["fp32", "bf16", "fp16"]),
        nodes=draw.choice([None, 2 if ranks == 1 else None]),
    )
    expect_equal(program, composed=False)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(4))
def test_rows_without_a_period(seed: int) -> None:
    """Computations in a random order, as in a user's table: whatever is not alike is played."""
    draw = random.Random(seed)
    program = compiled(microbatches=16, zero=draw.choice([0, 2]))
    rows = []
    for row in program.schedule:
        actions = list(row)
        for _ in range(200):
            at = draw.randrange(len(actions) - 1)
            if _free(actions[at], actions[at + 1]):
                actions[at], actions[at + 1] = actions[at + 1], actions[at]
        rows.append(tuple(actions))
    expect_equal(replace(program, schedule=tuple(rows)), composed=False)


def _free(a: Action, b: Action) -> bool:
    """Whether two actions may change places on their rank."""
    return "REDUCE_GRAD" not in (a.kind, b.kind) and a.microbatch != b.microbatch and a.kind != b.kind


@pytest.mark.sampled
@pytest.mark.parametrize("model", ["mixture.py", "translation.py", "tied.py"])
def test_other_models(model: str) -> None:
    """Experts, an encoder whose values many stages read, and a weight that two stages share."""
    expect_equal(compiled(str(ROOT / "tests" / "models" / model), mesh="2x2x2", zero=1))


@pytest.mark.parametrize("given", [{}, {"mesh": "4x2x2", "zero": 1, "bucket": "0B"}, {"mesh": "4x2x2", "zero": 3}])
def test_equal_stages_play_once(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the names of their calls and of the buckets of their gradients."""
    from partc.rehearsal import rehearsal

    played: list[int] = []
    before = rehearsal._Rehearsal._played

    def counted(self: Any, place: int, row: Any, told: Any) -> Any:
        played.append(len(row))
        return before(self, place, row, told)

    monkeypatch.setattr(rehearsal._Rehearsal, "_played", counted)
    program = compiled(**{"mesh": "4x1x1", "microbatches": 128, **given})
    played.clear()
    rehearsed(program)
    assert len(played) <= 3 and max(played) * 3 < len(program.schedule[0])
