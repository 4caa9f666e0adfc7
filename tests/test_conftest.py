"""The hooks that every run of the tests has: skips without a known reason fail it; traces that are kept are those made anew."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from partc.frontend import origin
from partc.frontend.captured_program import Batches
from partc.frontend.trace import trace_file
from partc.ir.mesh import Mesh
from tests.conftest import SKIPS, Skips
from tests.prefork import done

ROOT = Path(__file__).parents[1]


def skipped(reason: str) -> pytest.TestReport:
    return pytest.TestReport(
        "tests/a.py::test", ("a.py", 1, "test"), {}, "skipped", ("a.py", 1, f"Skipped: {reason}"), "call"
    )


def test_a_skip_without_a_known_reason_fails_the_run() -> None:
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    known = next(reason for reason, holds in SKIPS.items() if holds())
    skips = Skips()
    skips.pytest_runtest_logreport(skipped(known.partition("|")[0]))
    skips.pytest_sessionfinish(session)  # type: ignore[arg-type]
    assert session.exitstatus == pytest.ExitCode.OK and not skips.unexpected
    skips.pytest_runtest_logreport(skipped("could not import 'transformers'"))
    skips.pytest_sessionfinish(session)  # type: ignore[arg-type]
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    assert skips.unexpected == ["tests/a.py::test: Skipped: could not import 'transformers'"]


def test_a_reason_counts_only_where_it_holds() -> None:
    skips = Skips()
    for reason, holds in SKIPS.items():
        before = len(skips.unexpected)
        skips.pytest_runtest_logreport(skipped(reason.partition("|")[0]))
        assert (len(skips.unexpected) == before) == holds(), reason


def test_kept_traces_are_those_made_anew() -> None:
    """Of another mesh and another number of microbatches, which a trace does not depend on."""
    given = {"depth": "2"}
    for mesh, count in (("2", 1), ("2x2x2", 4)):
        how = {"mesh": Mesh.parse(mesh), "batches": Batches(microbatches=count), "precision": "fp64"}
        kept = origin.trace_file(ROOT / "examples" / "gpt.py", given, **how)
        assert kept == trace_file(ROOT / "examples" / "gpt.py", given, **how)
    assert origin.trace_file is not trace_file


def test_a_copy_of_the_runtime_is_its_own_file_in_a_forked_process(tmp_path: Path) -> None:
    """Its compiled code comes from the server; a changed copy is compiled anew."""
    text = (ROOT / "partc" / "runtime" / "documents.py").read_text()
    (tmp_path / "copied.py").write_text(text)
    (tmp_path / "changed.py").write_text(text + "\nCHANGED = True\n")
    (tmp_path / "main.py").write_text(
        "import changed, copied, sys\n"
        "for module in (changed, copied):\n"
        "    assert module.at_least.__code__.co_filename == module.__file__, module.at_least.__code__\n"
        "sys.exit(7 if changed.CHANGED and not hasattr(copied, 'CHANGED') else 1)\n"
    )
    ended = done([tmp_path / "main.py"])
    assert ended.returncode == 7, ended.stderr
