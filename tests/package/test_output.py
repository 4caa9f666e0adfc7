"""Writing a package: all or nothing, and never over files that partc did not write."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from partc.errors import PartcError
from partc.package.output import MANIFEST, PAGE, check_target, write, write_page
from partc.runtime.checkpoint.safetensors import save
from partc.runtime.train.log import StepLog
from partc.runtime.train.tuning import write_choices
from partc.runtime.whole_files import write_whole

PLAN = ("plan.json", json.dumps({"partc": 1}))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder: Path) -> str:
    with pytest.raises(PartcError) as failure:
        write([PLAN], folder)
    return failure.value.code


def test_a_package_is_written_with_its_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "build"
    assert write([PLAN, ("ranks/rank_000.py", "RANK = 0\n"), ("model.pt", b"\0\1")], folder) == folder
    assert {*snapshot(folder)} == {"plan.json", "ranks/rank_000.py", "model.pt", MANIFEST}
    done = subprocess.run(["sha256sum", "--quiet", "-c", MANIFEST], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [entry.name for entry in folder.parent.iterdir()] == ["build"]


def test_stale_files_go_and_the_users_own_stay(tmp_path: Path) -> None:
    folder = tmp_path / "build"
    write([PLAN, ("ranks/rank_000.py", "a"), ("ranks/rank_001.py", "b")], folder)
    (folder / "ranks" / "__pycache__").mkdir()
    (folder / "ranks" / "__pycache__" / "rank_000.pyc").write_text("stale")
    (folder / "runs").mkdir()
    (folder / "runs" / "loss.jsonl").write_text("mine")
    write([PLAN, ("ranks/rank_000.py", "c")], folder)
    assert {*snapshot(folder)} == {"plan.json", "ranks/rank_000.py", "runs/loss.jsonl", MANIFEST}
    assert (folder / "ranks" / "rank_000.py").read_text() == "c"
    assert (folder / "runs" / "loss.jsonl").read_text() == "mine"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    write([PLAN], tmp_path / "build")
    assert (tmp_path / "build" / "plan.json").exists()


@pytest.mark.parametrize(
    "content", [{"notes.txt": "mine"}, {"plan.json": "{}"}, {"plan.json": "[1]"}, {"plan.json": "x"}]
)
def test_folders_of_others_are_left_alone(tmp_path: Path, content: dict[str, str]) -> None:
    folder = tmp_path / "build"
    folder.mkdir()
    for name, text in content.items():
        (folder / name).write_text(text)
    before = snapshot(tmp_path)
    assert refused(folder) == "P0601"
    assert snapshot(tmp_path) == before


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "build").write_text("a file")
    assert refused(tmp_path / "build") == "P0601"


def test_a_changed_file_is_not_lost(tmp_path: Path) -> None:
    folder = tmp_path / "build"
    write([PLAN, ("stages/stage_0.py", "as emitted")], folder)
    (folder / "stages" / "stage_0.py").write_text("improved by hand")
    assert refused(folder) == "P0606"
    (folder / "stages" / "stage_0.py").unlink()
    check_target(folder)


def test_a_failure_leaves_the_older_package_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "build"
    write([PLAN, ("model.py", "first")], folder)
    before = snapshot(tmp_path)

    def breaks() -> Iterator[tuple[str, str]]:
        yield PLAN
        raise RuntimeError("while rendering")

    with pytest.raises(RuntimeError):
        write(breaks(), folder)
    assert snapshot(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert refused(tmp_path / "build") == "P0602"
    tmp_path.chmod(0o700)


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refused(tmp_path / "file" / "build") == "P0602"


@contextmanager
def small_disk(room: int) -> Iterator[None]:
    """A context in which no file grows beyond `room` bytes."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


LONG = "x" * 100_000
WRITERS: dict[str, Callable[[Path], object]] = {
    "a page": lambda path: write_page(PAGE + LONG, path),
    "a plan": lambda path: write_page(LONG, path, mark=""),
    "a text": lambda path: write_whole(path, LONG),
    "tensors": lambda path: save(path, {"x": torch.zeros(100_000)}),
    "configurations": lambda path: write_choices(path, "cpu", {LONG: {}}, lambda line: None),
}


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("what", WRITERS)
def test_a_full_disk_leaves_the_old_file_or_none(what: str, there: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if there:
        path.write_text(PAGE)
    before = snapshot(tmp_path)
    with small_disk(1 << 12), suppress(PartcError, OSError):
        WRITERS[what](path)
    assert snapshot(tmp_path) == before
    if what != "configurations":  # which keeps no file of another form
        WRITERS[what](path)
        assert {*snapshot(tmp_path)} == {"file"} and snapshot(tmp_path) != before


def test_a_continued_log_keeps_its_lines_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "note": "{LONG[:100]}"}}\n' for step in range(1, 101)))
    before = snapshot(tmp_path)
    with small_disk(1 << 12), suppress(Exception):
        StepLog(path, 200, start=90)
    assert snapshot(tmp_path) == before
    StepLog(path, 200, start=90).close()
    assert len(path.read_text().splitlines()) == 90


def test_a_replaced_file_keeps_its_link_and_its_permissions(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, "new")
    assert link.is_symlink() and path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        write_whole(tmp_path / "loop", "new")
    for other in (tmp_path, Path(os.devnull)):
        with pytest.raises(OSError, match="not a regular file"):
            write_whole(other, "new")
