"""A rank that dies ends the others soon, and they report which rank it was."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from partc.package.launch import local_environment, torchrun_command
from tests.prefork import done

pytestmark = [pytest.mark.slow, pytest.mark.processes]
TESTS = Path(__file__).parents[1]
SECONDS = 30.0  # what the project promises


def package(folder: Path, dp: int) -> Path:
    """The handmade package for 2 stages and no tensor axis."""
    build = folder / "build"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(TESTS / "handmade_package", build, ignore=ignore)
    shutil.copytree(TESTS.parent / "partc" / "runtime", build / "runtime", ignore=ignore)
    plan = json.loads((build / "plan.json").read_text())
    plan["mesh"] = f"pp=2,dp={dp},tp=1"
    (build / "plan.json").write_text(json.dumps(plan))
    for place in range(2):
        module = build / "ranks" / f"pp_{place}.py"
        groups = '("dp",)' if dp > 1 else "()"
        module.write_text(
            module.read_text().replace('("pp", "dp", "tp")', groups).replace("pp=2,dp=2,tp=2", plan["mesh"])
        )
    # The received shape is a literal: with dp=1 a microbatch has 4 rows.
    stage_1 = build / "stages" / "stage_1.py"
    stage_1.write_text(stage_1.read_text().replace("shape=(2, 6)", f"shape=({4 // dp}, 6)"))
    return build


def wait_for_steps(log: Path) -> None:
    deadline = time.monotonic() + 60
    while not log.exists() or log.read_text().count("\n") < 3:
        assert time.monotonic() < deadline, "no step was made"
        time.sleep(0.1)


def by_hand(build: Path, size: int, folder: Path, *arguments: object) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(size):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with (folder / f"{rank}.txt").open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(build / "train.py"), "--steps", "1000000", "--metrics", str(folder / "log")]
                    + [str(argument) for argument in arguments],
                    env={**local_environment(), **variables},
                    stdout=output,
                    stderr=output,
                )
            )
    return processes


@pytest.mark.parametrize("victim", [0, 3])
def test_ranks_started_by_hand(tmp_path: Path, victim: int) -> None:
    build = package(tmp_path, dp=2)
    processes = by_hand(build, 4, tmp_path)
    try:
        wait_for_steps(tmp_path / "log")
        processes[victim].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        codes = [process.wait(timeout=SECONDS) for process in processes]
        assert time.monotonic() - killed < SECONDS
    finally:
        for process in processes:
            process.kill()
    for rank, code in enumerate(codes):
        if rank == victim:
            continue
        assert code == 1
        text = (tmp_path / f"{rank}.txt").read_text()
        # Rank 0 holds the store: with it goes the place where failures are told.
        told = "rank 0, which holds the ranks' store, died" if victim == 0 else f"rank {victim} died"
        assert re.search(rf"error P0505: .*{told}.*; rank {rank} stops, in \S.* of step \d+", text), text


def test_ranks_under_torchrun(tmp_path: Path) -> None:
    build = package(tmp_path, dp=1)
    # It sends SIGTERM to the others, which asks for a checkpoint, too; but where a rank has died there is none.
    save = ["--save", str(tmp_path / "save"), "--save-every", "1000000"]
    command = torchrun_command(build, ["--steps", "1000000", "--metrics", str(tmp_path / "log"), *save])
    with (tmp_path / "output").open("wb") as output:
        launcher = subprocess.Popen(command, env=local_environment(), stdout=output, stderr=output)
    try:
        wait_for_steps(tmp_path / "log")
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        ranks = {rank_of(int(pid)): int(pid) for pid in children if rank_of(int(pid)) is not None}
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()
        assert launcher.wait(timeout=SECONDS + 5) != 0
        assert time.monotonic() - killed < SECONDS
    finally:
        launcher.kill()
    text = (tmp_path / "output").read_text()
    assert re.search(r"error P0505: .*rank 1 died.*; rank 0 stops, in \S.* of step \d+", text), text
    assert not list((tmp_path / "save").glob("step_*"))


def rank_of(pid: int) -> int | None:
    variables = dict(
        entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in entry
    )
    return int(variables["RANK"]) if "RANK" in variables else None


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_is_named(tmp_path: Path, failing: int) -> None:
    build = package(tmp_path, dp=1)
    stage = build / "stages" / f"stage_{failing}.py"
    text = stage.read_text()
    start = text.index("    def backward(self")
    body = text.index("\n", start) + 1
    stage.write_text(text[:body] + "        raise KeyError('oops')\n" + text[body:])
    processes = by_hand(build, 2, tmp_path)
    try:
        codes = [process.wait(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [1, 1]
    other = (tmp_path / f"{1 - failing}.txt").read_text()
    assert re.search(
        rf"error P0505: rank {failing} failed in {failing}B0 of step 1: KeyError: 'oops'; "
        rf"rank {1 - failing} stops, in \S.* of step \d",
        other,
    ), other


def test_the_wrong_number_of_ranks(tmp_path: Path) -> None:
    build = package(tmp_path, dp=1)
    ended = done([build / "train.py"], {**local_environment(), "RANK": "0", "WORLD_SIZE": "3"})
    assert ended.returncode == 2
    assert ended.stderr.startswith("error P0501: this package is for 2 ranks (pp=2,dp=1,tp=1), and was started on 3")
    assert "Traceback" not in ended.stderr
