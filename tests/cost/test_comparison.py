"""Schedules side by side: the figures, the drawings, and the command that prints them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from partc.cli import main
from partc.cost.simulation import Durations
from partc.errors import PartcError
from partc.reports import schedule_comparison
from partc.reports.schedule_comparison import candidates, figures, text
from partc.schedules import SCHEDULES
from partc.schedules.table import parse

GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")


def test_the_modules_example_is_what_it_prints() -> None:
    example = inspect.getdoc(schedule_comparison)
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
    assert shown.startswith("4 pipeline ranks, 8 microbatches, of which each takes a rank F=1,B=2,I=1,W=1,comm=0\n\n")
    assert shown.endswith(text(candidates(4, 8), width=150))
    assert "1f1b              4      33  27.3%  4 3 2 1" in shown
    assert "zbv               8    25.5   5.9%  4 4 4 4" in shown
    assert main(["compile", GPT, "--mesh", "pp=2", "--microbatches", "4", "-o", str(tmp_path / "build")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "build"), "--schedules"]) == 0
    assert capsys.readouterr().out.endswith(text(candidates(2, 4), width=150))


def test_durations_may_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--mesh", "pp=4", "--microbatches", "8", "--schedules", "--durations", "F=2, I=2.5,W=1.5,comm=0.5"]
    assert main(["inspect", GPT, *given]) == 0
    shown = capsys.readouterr().out
    assert "takes a rank F=2,B=4,I=2.5,W=1.5,comm=0.5\n" in shown
    # (m + p - 1) (F + B), and a transfer each way between any two ranks (GPipe).
    assert f"gpipe             4  {11 * 6 + 3 * 2 * 0.5:6g}  " in shown
    assert main(["inspect", GPT, "--mesh", "pp=4", "--durations", "F=2"]) == 2
    assert "error P0412: --durations needs --schedules" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["", "F", "F=", "F=x", "F=0", "F=-1", "X=1", "F=1,,B=2", "comm=inf", "W=nan", "f=1"])
def test_wrong_durations(wrong: str) -> None:
    with pytest.raises(PartcError) as failure:
        Durations.parse(wrong)
    assert failure.value.code == "P0412"


def test_peaks_of_many_ranks_are_summed_up() -> None:
    assert figures(candidates(32, 32)[1])[3] == "32 at most"
