"""On a request to stop, all ranks stop at one step and save; a loss that is not finite stops them with a message."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import partc
from partc.package.launch import local_environment, torchrun_command
from partc.runtime.checkpoint.manifest import checkpoints, read
from tests.durable import losses, same_records, train, trained
from tests.runtime.test_death import SECONDS, by_hand, package, wait_for_steps


def launched(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(command, env=local_environment(), stdout=output, stderr=output)


@pytest.mark.slow
@pytest.mark.processes
def test_one_rank_is_asked_and_all_stop_together(tmp_path: Path) -> None:
    build = package(tmp_path, dp=1)
    save = ("--save", tmp_path / "save", "--save-every", 10**6)
    processes = by_hand(build, 2, tmp_path, *save)
    try:
        wait_for_steps(tmp_path / "log")
        processes[1].send_signal(signal.SIGUSR1)
        assert [process.wait(timeout=SECONDS) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    (path,) = checkpoints(tmp_path / "save")
    step = read(path).step
    assert len(losses(tmp_path / "log")) == step
    assert f"interrupted after step {step}" in (tmp_path / "0.txt").read_text()
    # On virtual ranks it goes on as it would have.
    trained(build, "--steps", step + 2, "--record", tmp_path / "whole")
    trained(build, "--steps", step + 2, "--record", tmp_path / "rest", "--resume", tmp_path / "save")
    same_records(tmp_path / "whole", tmp_path / "rest", step + 1)


@pytest.mark.slow
@pytest.mark.processes
def test_the_launcher_is_asked(tmp_path: Path) -> None:
    arguments = ["--steps", str(10**6), "--metrics", str(tmp_path / "log"), "--save", str(tmp_path / "save")]
    launcher = launched(torchrun_command(package(tmp_path, dp=1), arguments), tmp_path)
    try:
        wait_for_steps(tmp_path / "log")
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(timeout=SECONDS + 5)
    finally:
        launcher.kill()
    text = (tmp_path / "output").read_text()
    step = read(checkpoints(tmp_path / "save")[0]).step
    assert f"interrupted after step {step}" in text and "P0505" not in text


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_stalls(tmp_path: Path, victim: int) -> None:
    processes = by_hand(package(tmp_path, dp=1), 2, tmp_path, "--timeout", 4)
    try:
        wait_for_steps(tmp_path / "log")
        processes[victim].send_signal(signal.SIGSTOP)
        assert processes[1 - victim].wait(timeout=SECONDS) == 1
    finally:
        for process in processes:
            process.kill()
    text = (tmp_path / f"{1 - victim}.txt").read_text()
    assert re.search(rf"error P0505: .*rank {victim}.*; rank {1 - victim} stops, in \S.* of step \d+", text), text


@pytest.mark.slow
def test_virtual_ranks_and_the_exit_code(tmp_path: Path) -> None:
    build = package(tmp_path, dp=2)
    arguments = ["--virtual", "--steps", 10**6, "--metrics", tmp_path / "log", "--save", tmp_path / "save"]
    command = [sys.executable, str(build / "train.py"), *map(str, arguments), "--exit-code", "7"]
    process = launched(command, tmp_path)
    wait_for_steps(tmp_path / "log")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=SECONDS) == 7
    assert read(checkpoints(tmp_path / "save")[0]).step == len(losses(tmp_path / "log"))


def broken(folder: Path, change: str) -> Path:
    build = package(folder, dp=1)
    stage = build / "stages" / "stage_1.py"
    text, there = stage.read_text(), "    down = down + p.down_bias\n"
    assert there in text
    stage.write_text(text.replace(there, f"{there}    {change}\n"))
    return build


def test_the_region_that_made_a_nan(tmp_path: Path) -> None:
    build = broken(tmp_path, "down = down * float('inf' if comm.step == 2 and comm.mb.rank == 1 else 1)")
    done = train(build, "--steps", 5, "--check-nans", "--save", tmp_path / "save", "--save-every", 1)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    said = r"error P0528: the loss of step 3 is (nan|-?inf): region block made it so first, at .* of stage 1, microbatch 1, on rank 1"
    assert re.search(said, done.stderr), done.stderr
    assert [read(path).step for path in checkpoints(tmp_path / "save")] == [2, 1]
    assert train(build, "--steps", 3).returncode == 0  # without the option


def test_a_region_that_communicates_nothing_is_named_too(tmp_path: Path) -> None:
    build = tmp_path / "plain"
    partc.compile(Path(__file__).parents[2] / "examples" / "gpt.py", mesh="2", microbatches=2, zero=3).write(build)
    done = train(build, "--steps", 6, "--check-nans", "--optimizer", "sgd", "--lr", 1e6)
    assert re.search(
        r"error P0528: the loss of step 3 is nan: region block made it so first, at blocks\.0", done.stderr
    )


@pytest.mark.slow
@pytest.mark.processes
def test_processes_name_it_too(tmp_path: Path) -> None:
    build = broken(tmp_path, "down = down * float('nan' if comm.step == 1 else 1)")
    command = torchrun_command(build, ["--steps", "5", "--check-nans"])
    done = subprocess.run(command, env=local_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("error P0528: the loss of step 2 is nan: region block") == 1, done.stderr
    assert "P0505" not in done.stderr
