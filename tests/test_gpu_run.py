"""The run on a GPU, as far as it needs none: its parts, their time, and its reports of measurements that are missing."""

from __future__ import annotations

import ast
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.gpu import __main__ as run
from tests.gpu import commands, training
from tests.gpu.results import Deadline, Results, folder_of
from tests.gpu.training import Measured

ROOT = Path(__file__).parent


def test_every_part_ends_within_one_call() -> None:
    """A call on a lent machine lasts 600 seconds at most."""
    assert all(part.seconds < 600 for part in run.PARTS.values())
    said = CliRunner().invoke(run.main, ["--list"])
    assert said.exit_code == 0 and [line.split()[0] for line in said.output.splitlines()] == list(run.PARTS)


def test_kernels_tests_that_need_processes_without_gpus_are_left_out() -> None:
    """On a GPU they run with TRITON_INTERPRET=0, where virtual ranks, which are on CPUs, cannot run kernels."""
    names = [
        name for part in run.PARTS.values() if getattr(part.run, "func", None) is run.tests for name in part.run.args[0]
    ]
    assert len(names) == 10
    for name in names:
        text = (ROOT / "kernels" / f"test_{name}.py").read_text()
        for item in ast.parse(text).body:
            if isinstance(item, ast.FunctionDef) and "virtual=True" in (ast.get_source_segment(text, item) or ""):
                assert "interpreted" in map(ast.unparse, item.decorator_list), item.name


def test_rows_are_in_the_files_as_they_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    results = Results(folder_of(None))
    results.table("Rows", "what", "how")
    results.row("a", 1)
    text = (tmp_path / "out" / "gpu.md").read_text()
    assert "## Rows" in text and "| a | 1 |" in text
    (line,) = (tmp_path / "out" / "gpu.jsonl").read_text().splitlines()
    assert json.loads(line) | {"at": 0} == {"table": "Rows", "what": "a", "how": 1, "at": 0}
    assert folder_of(tmp_path) == tmp_path
    monkeypatch.delenv("OUT")
    assert folder_of(None) is None


def test_commands_find_this_checkout_and_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    (tmp_path / "partc").mkdir()
    (tmp_path / "partc" / "__init__.py").write_text("")
    assert commands.done([sys.executable, "-S", "-c", "import partc"], 60) == ""
    assert commands.done([sys.executable, "-c", "raise SystemExit(3)"], 60) == "exit code 3"
    started = time.monotonic()
    assert commands.done([sys.executable, "-c", "import time; time.sleep(60)"], 0.5) == "took more than 0 s"
    assert time.monotonic() - started < 20 and commands.done(["no such command"], 0) == "no time left"


@pytest.mark.parametrize(
    ("speeds", "good", "said"),
    [
        ({}, True, "skipped: liger_kernel is not installed"),
        ({"eager": "exit code 1"}, False, "exit code 1"),
        ({"compile": Measured(200.0, 10)}, False, "0.50"),
        ({"compile": Measured(50.0, 2)}, False, "2.00"),
    ],
)
def test_training_is_compared_with_peers_that_are_there(
    speeds: dict[str, Any], good: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def measured(label: str, *given: object) -> Measured | str:
        order.append(label)
        return speeds.get(label, Measured(100.0, 5) if label in training.LABELS else Measured(90.0, 6))

    monkeypatch.setattr(training, "_package", measured)
    monkeypatch.setattr(training, "_peer", measured)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    results = Results(tmp_path)
    assert training.table("GPT-2 124M", results, Deadline(100), ()) is good
    assert said in (tmp_path / "gpu.md").read_text()
    assert order[:2] == ["partc, triton", "compile"] and "liger" not in order
    order.clear()
    training.table("Llama 1B", results, Deadline(100), ("Llama 1B, eager",))
    training.table("Llama 1B", results, Deadline(100), (), slow=True)
    assert order == ["eager", "partc, triton", "max-autotune"]
