"""Schedules side by side: the figures, the drawings, and the command that shows them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from partc import comparison
from partc.cli import main
from partc.comparison import candidates, text
from partc.schedules import SCHEDULES
from partc.schedules.table import parse

GPT = str(Path(__file__).parents[1] / "examples" / "gpt.py")


def test_the_modules_example_is_what_it_prints() -> None:
    example = inspect.getdoc(comparison)
    printed = text(candidates(2, 3), width=80).splitlines()
    shown = [line[4:].rstrip() for line in example.splitlines() if line.startswith("    ")]
    assert len(shown) == 6
    assert all(line in printed for line in shown if line)


def test_all_do_the_same_work() -> None:
    for found in candidates(4, 8, virtual_stages=3):
        assert found.timeline.busy == pytest.approx((3 * 8,) * 4)
        assert not found.timeline.stuck
    assert [found.stages for found in candidates(4, 8, virtual_stages=3)] == [4, 4, 12, 4, 8, 8]


def test_drawings_are_at_one_scale_and_complete() -> None:
    found = candidates(4, 8)
    lines = text(found, width=140).splitlines()
    assert max(map(len, lines)) <= 140
    for item in found:
        at = lines.index(f"{item.name}: {item.does}")
        drawn = lines[at + 1 : at + 5]
        assert max(map(len, drawn)) - 3 == round(item.timeline.makespan * 4)
        for line, busy in zip(drawn, item.timeline.busy, strict=True):
            assert sum(letter != " " for letter in line[3:]) == busy * 4
            for microbatch in "01234567":
                assert microbatch in line[3:]


def test_what_does_not_fit_is_said() -> None:
    found = text(candidates(4, 64), width=80)
    assert "too long to draw in 80 columns" in found
    assert len(found.splitlines()) == 1 + len(SCHEDULES) + 2


def test_a_table_stands_beside_them() -> None:
    table = parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", file="mine.csv", ranks=2, microbatches=2)
    last = candidates(2, 2, table=table)[-1]
    assert (last.name, last.stages) == ("mine.csv", 2)
    assert last.timeline.makespan == candidates(2, 2)[1].timeline.makespan


def test_inspect_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    assert main(["inspect", GPT, "--mesh", "pp=4,dp=2", "--microbatches", "8", "--schedules"]) == 0
    shown = capsys.readouterr().out
    assert shown == text(candidates(4, 8), width=150)
    assert "1f1b              4      33  27.3%  4 3 2 1" in shown
    assert "zbv               8    25.5   5.9%  4 4 4 4" in shown
    assert main(["compile", GPT, "--mesh", "pp=2", "--microbatches", "4", "-o", str(tmp_path / "build")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "build"), "--schedules"]) == 0
    assert capsys.readouterr().out == text(candidates(2, 4), width=150)
