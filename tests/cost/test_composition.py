"""Composed steps equal simulated ones, to the byte: peaks, their positions and contents, and the course of memory."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from partc.api import compilation
from partc.compilation.options import Options
from partc.ir.program import Action, Program
from partc.rehearsal.composition import Course
from partc.rehearsal.ledger import Leaf, counting_meta_operations
from partc.rehearsal.rehearsal import rehearsed
from partc.schedules import SCHEDULES
from tests.models.loops import EVERY
from tests.test_architecture import ROOT

GPT = str(ROOT / "examples" / "gpt.py")


def compiled(model: str = GPT, depth: int = 0, **given: Any) -> Program:
    more = {"depth": str(depth)} if depth else {}
    options: dict[str, Any] = {"mesh": "4x2x2", "precision": "fp32", "schedule": "1f1b", "seed": 0, "shard": ()}
    checked = Options.checked(**{**options, "microbatches": 24, **given})
    return compilation(model, None, checked, model_options={"batch": str(8 * checked.microbatches), **more}).program


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


def loops(**given: str) -> Program:
    options = Options.checked(mesh="dp=2", schedule="1f1b", seed=0, shard=(), microbatches=2)
    return compilation(str(ROOT / "tests" / "models" / "loops.py"), None, options, model_options=given).program


@pytest.mark.parametrize("loop", sorted(EVERY))
def test_loops_over_time(loop: str) -> None:
    """Steps that are left out hold as much memory as those that run."""
    expect_equal(loops(loop=loop), composed=False)


class Calls(TorchFunctionMode):
    """Counts calls of torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_rehearsal_does_not_grow_with_the_steps_of_a_loop() -> None:
    counts: list[int] = []
    for seq in ("16", "64"):
        program = loops(loop="gated", seq=seq)
        with Calls() as calls:
            rehearsed(program)
        counts.append(calls.count)
    assert counts[0] == counts[1]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of actions in the rows that rehearsals play."""
    from partc.rehearsal import rehearsal

    rows: list[int] = []
    before = rehearsal.Rehearsal.play

    def counted(self: Any, place: int, row: Any, acks: Any) -> Any:
        rows.append(len(row))
        return before(self, place, row, acks)

    monkeypatch.setattr(rehearsal.Rehearsal, "play", counted)
    return rows


@pytest.mark.parametrize("given", [{}, {"mesh": "4x2x2", "zero": 1, "bucket": "0B"}, {"mesh": "4x2x2", "zero": 3}])
def test_equal_stages_play_once(given: dict[str, Any], played: list[int]) -> None:
    """Whatever the names of their calls and of the buckets of their gradients."""
    program = compiled(**{"mesh": "4x1x1", "microbatches": 128, **given})
    played.clear()
    rehearsed(program)
    assert len(played) <= 3 and max(played) * 3 < len(program.schedule[0])


def test_ranks_that_release_other_numbers_of_gradients_play_once(played: list[int]) -> None:
    program = compiled(mesh="8x1x1", schedule="interleaved", virtual_stages=2, microbatches=16, depth=14)
    played.clear()
    rehearsed(program)
    assert len(played) <= 4
    expect_equal(program)


@pytest.mark.parametrize("zero", [1, 3])
def test_equal_exchanges_run_once(monkeypatch: pytest.MonkeyPatch, zero: int) -> None:
    """Blocks of equal layers in all microbatches, for any number of microbatches."""
    from partc.runtime.execution.parts import Parts

    run: list[str] = []
    for name in ("gather", "scatter", "scatter_sums"):
        before = getattr(Parts, name)
        counted = lambda self, *args, before=before, name=name, **how: run.append(name) or before(self, *args, **how)  # noqa: E731
        monkeypatch.setattr(Parts, name, counted)
    counts = []
    for depth, microbatches in ((4, 4), (8, 8)):
        run.clear()
        rehearsed(compiled(mesh="1x2x1", zero=zero, depth=depth, microbatches=microbatches))
        counts.append((run.count("gather"), run.count("scatter") + run.count("scatter_sums")))
    assert counts[0] == counts[1] and min(counts[0]) > 0


def test_gradients_of_one_weight_are_summed_as_leaves_or_tensors() -> None:
    with counting_meta_operations() as ledger:
        leaf = Leaf(ledger.holds(16), (torch.float32, (4,), (1,), 0))
        x = torch.empty(4, device="meta")
        assert all(total.shape == (4,) for total in (leaf + leaf, leaf + x, x + leaf))
