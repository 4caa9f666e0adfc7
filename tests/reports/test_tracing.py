"""`partc trace`: a run's steps and the prediction, in the Trace Event Format; wrong folders."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import partc
from partc.cli import main
from partc.communication.events import Entered, events
from partc.cost.forecast import Forecast
from partc.cost.simulation import timeline
from partc.ir.program import ITEMSIZE
from tests import prefork

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMON = {"ph", "name", "pid", "tid", "ts"}
# By phase, what an event must have besides; and may.
FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "X": ({"dur", "cat", "args"}, set()),
    "M": ({"args"}, set()),
    "s": ({"id", "cat"}, set()),
    "f": ({"id", "cat", "bp"}, set()),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tracing") / "build"
    partc.compile(str(EXAMPLES / "gpt.py"), mesh="2x2x2", microbatches=4, zero=2).write(path)
    return path


@pytest.fixture(scope="module")
def traced(package: Path) -> Path:
    folder = package.parent / "trace"
    command = [package / "train.py", "--virtual", "--steps", 4, "--trace", folder, "--trace-steps", "2:3"]
    done = prefork.done(command)
    assert done.returncode == 0, done.stderr
    assert f"traced steps 2 to 3: partc trace {folder} shows them" in done.stderr
    return folder


def checked(path: Path) -> dict[str, Any]:
    """A trace that keeps to the format: fields by phase, slices that nest, flows that start before they end."""
    document: dict[str, Any] = json.loads(path.read_text())
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"} and document["displayTimeUnit"] == "ms"
    lines: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    flows: dict[str, list[dict[str, Any]]] = {}
    for event in document["traceEvents"]:
        needed, allowed = FIELDS[event["ph"]]
        assert needed | COMMON <= set(event) <= needed | COMMON | allowed, event
        assert isinstance(event["name"], str) and isinstance(event["ts"], int | float)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lines.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"], event["name"])
            )
        elif event["ph"] in "sf":
            flows.setdefault(event["id"], []).append(event)
    for place, slices in lines.items():
        if place[0] < 1_000_000:
            open_until: list[float] = []
            for start, end, name in sorted(slices, key=lambda each: (each[0], -each[1])):
                while open_until and open_until[-1] <= start + 0.0015:
                    open_until.pop()
                assert not open_until or end <= open_until[-1] + 0.0015, (place, name, "crosses another slice")
                open_until.append(end)
    for start, end in flows.values():
        assert (start["ph"], end["ph"], end["bp"]) == ("s", "f", "e") and start["ts"] <= end["ts"]
        for event in (start, end):
            slices = lines[event["pid"], event["tid"]]
            assert any(a - 0.0015 <= event["ts"] <= b + 0.0015 for a, b, _ in slices), "an arrow that hangs in the air"
    return document


def slices(document: dict[str, Any], process: int, kind: str) -> list[dict[str, Any]]:
    events = [each for each in document["traceEvents"] if each["ph"] == "X" and each["pid"] == process]
    return sorted((each for each in events if each["cat"] == kind), key=lambda each: each["ts"])


@pytest.mark.slow
def test_a_run_beside_its_prediction(traced: Path, package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(traced), "--package", str(package)]) == 0
    said = capsys.readouterr().out
    assert "measured" in said and "predicted" in said and "computation times" in said
    document = checked(traced / "trace.json")
    names = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert len(names) == 8 + 2 and names[5] == "rank 5 (pp 1, dp 0, tp 1)" and names[1_000_001] == "predicted: pp 1"
    about = document["otherData"]
    assert set(about) == {"producer", "clock", "measured", "predicted", "prediction"}
    assert about["predicted"]["compute"] == pytest.approx(about["measured"]["compute"], rel=1e-6)
    plan = json.loads((package / "plan.json").read_text())
    for rank in range(8):
        work = slices(document, rank, "work")
        for step in (2, 3):
            done = [each["name"] for each in work if each["args"]["step"] == step]
            schedule = plan["schedule"][str(rank // 4)].split()
            assert [name for name in done if name[0].isdigit()] == schedule
            assert done[-1] == "the update"
        # What a rank says to others in a step, and what for, is as the prediction has it.
        real = [each for each in slices(document, rank, "collective") if each["args"]["step"] == 2]
        planned = slices(document, 1_000_000 + rank // 4, "collective")
        said = [
            [(e["name"], *(e["args"][key] for key in ("bytes", "axis", "why"))) for e in every]
            for every in (real, planned)
        ]
        assert len(real) > 50 and Counter(said[0] * 2) == Counter(said[1])
    arrows = Counter(e["id"].split()[0] for e in document["traceEvents"] if e["ph"] == "s")
    assert arrows == {"measured": 2 * 4 * 8, "predicted": 2 * 8}  # steps x (4 microbatches there and back) x 4 pairs


@pytest.mark.slow
def test_a_package_alone_is_predicted(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(package), "-o", str(tmp_path / "t.json"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    document = checked(tmp_path / "t.json")
    assert said == {"path": str(tmp_path / "t.json"), **document["otherData"]}
    assert {event["pid"] for event in document["traceEvents"]} == {1_000_000, 1_000_001}
    parts = said["predicted"]
    assert sum(parts.values()) == pytest.approx(2 * parts["seconds"]) and parts["bubble"] > 0
    assert "clock" not in said and "H100" in said["prediction"]
    on = ["trace", str(package), "-o", str(tmp_path / "t.json"), "--json", "--cluster"]
    assert main([*on, "2x4xA100-80GB"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "2x4xA100-80GB" in found["prediction"] and found["predicted"] != parts
    assert main([*on, "1xH100"]) == 2 and "P0803" in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero-bubble", "zbv"])
def test_the_prediction_is_the_schedule_played(schedule: str) -> None:
    program = partc.compile(str(EXAMPLES / "gpt.py"), mesh="2x1x1", microbatches=4, schedule=schedule).program
    forecast = Forecast(program)
    for place, spans in enumerate(forecast.places):
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(spans))
        for span in spans:
            work = [piece for piece in span.inside.pieces if not piece.segment.op]
            assert all(one.end <= two.start + 1e-12 for one, two in pairwise(work))
            assert all(piece.end <= span.inside.seconds + span.inside.carried + 1e-12 for piece in span.inside.pieces)
        played = [str(span.compute) for span in timeline(program).ranks[place]]
        assert [span.name for span in spans if span.name in played] == played
    assert sum(forecast.split()) == pytest.approx(forecast.seconds)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["trace", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_wrong_folders_are_refused(
    traced: Path, package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "P0607" in refused(capsys, tmp_path / "none")
    assert "P0607: " in refused(capsys, tmp_path) and "rank_000.json" in str(tmp_path / "rank_000.json")
    folder = tmp_path / "trace"
    shutil.copytree(traced, folder)
    (folder / "trace.json").write_text("mine")
    assert "P0601" in refused(capsys, folder) and (folder / "trace.json").read_text() == "mine"
    (folder / "trace.json").unlink()
    (folder / "rank_005.json").unlink()
    assert "has no rank_005.json, of 8 ranks" in refused(capsys, folder)
    good = json.loads((traced / "rank_005.json").read_text())
    for change, word in (
        ({"plan": "0"}, "another run"),
        ({"steps": good["steps"][:1]}, "other steps"),
        ({"steps": []}, "no step"),
        ({"steps": [{"step": 2, "intervals": [[1, 2, "work"]]}]}, "has 3 items, not 8"),
        ({"steps": [{"step": 2, "intervals": [["a", 2, "work", "", "", 0, "", 0]]}]}, "not an integer"),
        ({"fields": []}, "intervals of"),
        ({"rank": "5"}, "rank is '5', not an integer"),
        ({"partc_trace": 7}, "format 1"),
    ):
        (folder / "rank_005.json").write_text(json.dumps(good | change))
        said = refused(capsys, folder)
        assert "P0607" in said and word in said, said
    (folder / "rank_005.json").write_text("{" * 10)
    assert "is not JSON" in refused(capsys, folder)
    assert "P0608" in refused(capsys, package, "--package", package)


def test_without_its_package_a_trace_is_shown_alone(
    traced: Path, package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in traced.glob("rank_*.json"):
        head = json.loads(path.read_text())
        (tmp_path / path.name).write_text(json.dumps(head | {"package": str(tmp_path / "moved")}))
    assert main(["trace", str(tmp_path)]) == 0
    assert "no prediction: --package DIR" in capsys.readouterr().out
    assert "prediction" not in checked(tmp_path / "trace.json")["otherData"]
    assert main(["trace", str(tmp_path), "--package", str(package)]) == 0
    assert "computation times" in capsys.readouterr().out
    other = tmp_path / "other"
    other.mkdir()
    (other / "plan.json").write_text("{}")
    assert "P0608" in refused(capsys, tmp_path, "--package", other)


def test_clocks_of_several_machines_meet_in_the_time_of_day(traced: Path, package: Path, tmp_path: Path) -> None:
    """Ranks 4 to 7 as of a machine that was started a day earlier, with a monotonic clock to match."""
    day = 86_400 * 10**9
    for path in traced.glob("rank_*.json"):
        head = json.loads(path.read_text())
        if head["rank"] > 3:
            head |= {"machine": head["machine"] + 1, "epoch": head["epoch"] - day}
            for step in head["steps"]:
                step["intervals"] = [
                    [a + day, b + day, *rest[:-1], rest[-1] + day] for a, b, *rest in step["intervals"]
                ]
        (tmp_path / path.name).write_text(json.dumps(head))
    assert main(["trace", str(tmp_path), "--package", str(package)]) == 0
    there = checked(tmp_path / "trace.json")
    assert main(["trace", str(traced), "--package", str(package), "-o", str(tmp_path / "here.json")]) == 0
    here = checked(tmp_path / "here.json")
    assert there["otherData"]["clock"] != here["otherData"]["clock"]
    # What rank 0 took for the time of day when it began to write may differ from rank 4's by what passed between.
    for name, value in here["otherData"]["measured"].items():
        assert there["otherData"]["measured"][name] == pytest.approx(value, rel=0.2)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("2x2x2", {"zero": 3}),
        ("4x2x1", {"zero": 3, "schedule": "zero-bubble"}),
        ("1x4x1", {"zero": 1, "nodes": 2, "bucket": "0B"}),
        ("2x4x1", {"zero": 3, "nodes": 2, "compress_grads": "int8"}),
        ("1x4x1", {"nodes": 2, "bucket": "0B"}),
    ],
)
def test_each_action_says_what_is_proved_of_it(mesh: str, options: dict[str, Any]) -> None:
    """Collectives in their order, over the same axes and of as many bytes, also where one action starts another's."""
    program = partc.compile(str(EXAMPLES / "gpt.py"), mesh=mesh, microbatches=4, **options).program
    forecast = Forecast(program)
    for place, row in enumerate(events(program).places):
        proved: dict[str, list[tuple[str, str, int]]] = {}
        for event in row:
            if isinstance(event, Entered):
                size = math.prod(event.shape) * ITEMSIZE[event.dtype]
                proved.setdefault(event.action, []).append((event.op, ",".join(event.axes), size))
        for span in forecast.places[place]:
            if span.name[0].isdigit() and not span.name.endswith("REDUCE_GRAD"):
                planned = [(part.segment.op, part.segment.over, part.segment.bytes) for part in span.inside.collectives]
                assert planned == proved.get(span.name, []), span.name
