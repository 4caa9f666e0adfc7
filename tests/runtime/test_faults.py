"""Stalled or missing ranks, full memory or disks, and signals: each ends in time, with a code and a name."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from partc.package.launch import local_environment, torchrun_command
from partc.runtime.checkpoint.manifest import checkpoints
from partc.runtime.clock import Clock
from partc.runtime.errors import UsageError, enough_memory, tell, writing
from partc.runtime.optimizer.update import Updated
from partc.runtime.processes import processes, watchdog
from partc.runtime.processes.rendezvous import LauncherVariables, world
from partc.runtime.processes.signals import Caught
from partc.runtime.processes.watchdog import Watchdog
from partc.runtime.torch_private import lone_store
from partc.runtime.train.log import StepLog
from tests.prefork import done
from tests.runtime.test_death import SECONDS, by_hand, package, rank_of, wait_for_steps

together = pytest.mark.processes


def ended(process: subprocess.Popen[bytes], seconds: float) -> int:
    try:
        return process.wait(timeout=seconds)
    finally:
        process.kill()


# Real processes


@pytest.mark.slow
@together
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_stalls_is_named_by_default(tmp_path: Path, victim: int) -> None:
    """Rank 0 holds the store; a short stop harms nobody."""
    processes = by_hand(package(tmp_path, dp=1), 2, tmp_path)
    try:
        wait_for_steps(tmp_path / "log")
        processes[victim].send_signal(signal.SIGSTOP)
        time.sleep(4)
        processes[victim].send_signal(signal.SIGCONT)
        before = (tmp_path / "log").read_text().count("\n")
        while (tmp_path / "log").read_text().count("\n") < before + 3:
            time.sleep(0.1)
        processes[victim].send_signal(signal.SIGSTOP)
        assert processes[1 - victim].wait(timeout=SECONDS) == 1
        assert processes[victim].wait(timeout=SECONDS) == -signal.SIGKILL  # nobody else would
    finally:
        for process in processes:
            process.kill()
    text = (tmp_path / f"{1 - victim}.txt").read_text()
    who = "rank 0, which holds the ranks' store," if victim == 0 else "rank 1"
    assert re.search(rf"error P0505: {who} stalls, stopped by a signal.*; rank {1 - victim} stops, in \S", text), text


@pytest.mark.slow
@together
def test_a_rank_that_stalls_in_start_up(tmp_path: Path) -> None:
    processes = by_hand(package(tmp_path, dp=1), 2, tmp_path)
    try:
        time.sleep(0.3)
        processes[1].send_signal(signal.SIGSTOP)  # while it loads torch
        assert processes[0].wait(timeout=SECONDS + 10) == 1
    finally:
        for process in processes:
            process.kill()
    assert re.search(r"error P0505: rank 1 stalls.*; rank 0 stops", (tmp_path / "0.txt").read_text())


@pytest.mark.slow
@together
def test_a_call_that_keeps_the_lock_of_python_is_no_stall(tmp_path: Path) -> None:
    build = package(tmp_path, dp=1)
    model = build / "model.py"
    late = """

def data(step):
    import ctypes, os
    if step == 3 and os.environ["RANK"] == "1":
        ctypes.PyDLL(None).sleep(22)
    return batch()
"""
    model.write_text(model.read_text() + late)
    processes = by_hand(build, 2, tmp_path)
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "log").exists() or (tmp_path / "log").read_text().count("\n") < 6:
            assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
@together
@pytest.mark.parametrize(
    ("rank", "said"), [(0, "rank 1 has not come"), (1, r"rank 0, .* is not there \(127.0.0.1:\d+")]
)
def test_a_rank_that_never_comes(tmp_path: Path, rank: int, said: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = _alone(package(tmp_path, dp=1), rank, port, "--timeout", "4")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(rf"error P0505: {said}.* after 4 s; rank {rank} stops", done.stderr), done.stderr


@pytest.mark.slow
@together
@pytest.mark.parametrize(
    ("rank", "code", "said"),
    [
        (0, 2, "P0536: port {port}, on which rank 0 is to open the ranks' store, is in use"),
        (1, 1, "P0505: rank 0, .* does not answer at 127.0.0.1:{port} after 4 s; rank 1 stops"),
    ],
)
def test_a_port_in_use(tmp_path: Path, rank: int, code: int, said: str) -> None:
    """By somebody who answers nothing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = _alone(package(tmp_path, dp=1), rank, port, "--timeout", "4")
    assert done.returncode == code and "Traceback" not in done.stderr
    assert re.search(f"error {said.format(port=port)}", done.stderr), done.stderr


def _alone(build: Path, rank: int, port: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return done([build / "train.py", *arguments], {**local_environment(), **variables})


@pytest.mark.slow
@together
def test_a_launcher_that_is_killed_is_no_failure_to_write(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "save"), "--save-every", "1"]
    command = torchrun_command(
        package(tmp_path, dp=1), ["--steps", "1000000", "--metrics", str(tmp_path / "log"), *save]
    )
    with (tmp_path / "output").open("wb") as output:
        launcher = subprocess.Popen(command, env=local_environment(), stdout=output, stderr=output)
    wait_for_steps(tmp_path / "log")
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    ranks = [int(pid) for pid in children if rank_of(int(pid)) is not None]
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + SECONDS
    while any(processes.run_state(str(processes.place_of(pid))) == "runs" for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    text = (tmp_path / "output").read_text()
    assert text.count("error P0505: the launcher, which holds the ranks' store, died") == 2, text
    assert "P0526" not in text and "Traceback" not in text


@pytest.mark.slow
@together
def test_partc_run_passes_a_signal_on(tmp_path: Path) -> None:
    """torchrun fails when it is stopped; a run whose ranks have saved and ended well has not failed."""
    import tests.durable

    build = tests.durable.build(tmp_path, "dp=2")
    options = ["--metrics", str(tmp_path / "log"), "--save", str(tmp_path / "save"), "--save-every", "1000000"]
    command = [sys.executable, "-m", "partc", "run", str(build), "--steps", "1000000", "--", *options]
    with (tmp_path / "output").open("wb") as output:
        run = subprocess.Popen(command, env=local_environment(), stdout=output, stderr=output)
    wait_for_steps(tmp_path / "log")
    run.send_signal(signal.SIGTERM)
    code, text = ended(run, SECONDS), (tmp_path / "output").read_text()
    assert code == 0 and "interrupted after step" in text and "P0505" not in text, text
    assert len(checkpoints(tmp_path / "save")) == 1


# Pieces


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this job's rank 7."""
    variables = {name: os.environ[name] for name in processes.JOB_VARIABLES if name in os.environ}
    process = subprocess.Popen(["sleep", "60"], env={**variables, "RANK": "7", "PATH": os.environ["PATH"]})
    yield process
    process.kill()
    process.wait()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_conditions_of_processes(sleeper: subprocess.Popen[bytes]) -> None:
    place = processes.place_of(sleeper.pid)
    assert place is not None and processes.run_state(place) == "runs" == processes.run_state(processes.process_place())
    sleeper.send_signal(signal.SIGSTOP)
    until(lambda: processes.run_state(place) == "stopped")
    processes.end_stopped(place)
    until(lambda: processes.run_state(place) == "gone")  # before anyone has waited for it
    machine, space, number, began = place.rsplit(":", 3)
    assert processes.run_state(f"{machine}:{space}:{os.getpid()}:{began}") == "gone"  # the number is another's now
    assert processes.run_state(f"another:{space}:{number}:{began}") == "unknown" == processes.run_state("elsewhere")


def test_siblings(tmp_path: Path) -> None:
    """Ranks find those that the same launcher has started, scripts around them or not."""
    told = tmp_path / "told"
    code = f"import sys; sys.path.insert(0, {str(Path(processes.__file__).parents[3])!r})\n"
    code += "import time; from partc.runtime.processes import processes; time.sleep(0.5)\n"
    code += f"open({str(told)!r}, 'w').write(' '.join(map(str, sorted(processes.siblings()))))"
    shared = {**os.environ, "MASTER_PORT": "1", "MASTER_ADDR": "a", "WORLD_SIZE": "3"}
    others = [
        subprocess.Popen(["sleep", "60"], env={**shared, **more})
        for more in ({"RANK": "2"}, {"RANK": "5", "MASTER_PORT": "2"}, {"RANK": ""})
    ]
    try:
        for command in ([sys.executable, "-c", code], ["sh", "-c", '"$0" -c "$1"; exit 0', sys.executable, code]):
            subprocess.run(command, env={**shared, "RANK": "1"}, check=True)
            assert told.read_text() == "1 2"
    finally:
        for other in others:
            other.kill()
            other.wait()


def watching(rank: int, size: int, monkeypatch: pytest.MonkeyPatch, **conditions: str) -> Watchdog:
    """A rank's watch without its thread; conditions are of the ranks' places, which are `p0`, `p1`, ..."""
    monkeypatch.setattr(watchdog, "run_state", lambda place: conditions.get(place, "unknown"))
    monkeypatch.setattr(watchdog, "end_stopped", lambda place: None)
    made = Watchdog(lone_store(), LauncherVariables(rank, size), Caught(checkpoints=False), Clock(), 600.0, None)
    for other in range(size):
        beat(made, other, 0)
    made.lost_ranks(made.store, 1.0)
    return made


def beat(made: Watchdog, rank: int, number: int) -> None:
    made.store.set(f"alive/{rank}", f"{number} p{rank} 0F0 of step 3")


def seconds_until_lost(made: Watchdog, alive: tuple[int, ...] = (), most: int = 700) -> tuple[int, str]:
    for second in range(1, most):
        for rank in alive:
            beat(made, rank, second)
        lost = made.lost_ranks(made.store, 1.0)
        if lost:
            return second, lost
    return most, ""


@pytest.mark.parametrize(
    ("condition", "least", "most", "words"),
    [
        ("gone", 1, 1, "rank 1 died (last seen in 0F0 of step 3)"),
        ("stopped", 15, 17, "rank 1 stalls, stopped by a signal (last seen in 0F0 of step 3)"),
        ("unknown", 20, 25, "rank 1 died or stalls, without a sign of life for"),
        ("runs", 600, 602, "rank 1 stalls (last"),
    ],
)
def test_how_silence_is_judged(
    condition: str, least: int, most: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, lost = seconds_until_lost(watching(0, 3, monkeypatch, p1=condition), alive=(2,))
    assert least <= second <= most and lost.startswith(words), (second, lost)


def test_those_whom_a_lost_rank_watched_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    second, lost = seconds_until_lost(watching(0, 5, monkeypatch, p1="stopped", p2="stopped"), alive=(3, 4))
    assert second <= 17 and "rank 1 stalls" in lost and "rank 2 stalls" in lost and "rank 3" not in lost, lost


def test_a_silent_rank_that_runs_is_vouched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sees that rank 1 runs; rank 3, on another machine, sees only what stands in the store."""
    afar = watching(3, 4, monkeypatch)
    near = watching(0, 4, monkeypatch, p1="runs")
    afar.store = near.store
    for second in range(100):
        beat(near, 2, second)
        assert near.lost_ranks(near.store, 1.0) == "" and afar.look_at(near.store, 1, 1.0).silent < watchdog.AFAR


def test_a_whole_job_that_was_suspended_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds count in which this rank runs: it has been away for an hour, and looks twice."""
    made = watching(0, 2, monkeypatch, p1="stopped")
    assert made.lost_ranks(made.store, 3600.0) == ""
    beat(made, 1, 1)
    assert made.lost_ranks(made.store, 1.0) == "" and made.look_at(made.store, 1, 0.0).silent == 0


def test_who_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = watching(0, 3, monkeypatch)
    made.store.set("alive/1", "5 p1 0F0 of step 3, recv over link 0 1")
    made.store.set("alive/2", "5 p2 data of step 3")
    assert made.busy_ranks() == "; rank 2 is in data of step 3"


@pytest.mark.parametrize(
    ("variables", "cause"),
    [
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "x"}, "RANK is not set"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "x", "RANK": "2"}, "RANK is '2', and must be a number from 0 to 1"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "x", "RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "x", "RANK": "1"}, "MASTER_PORT is not set"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "x", "RANK": "1", "MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
    ],
)
def test_environments(variables: dict[str, str], cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"P0536: {re.escape(cause)}"):
        world()


def test_a_disk_that_is_full() -> None:
    with pytest.raises(UsageError, match=r"P0538: rank 2 cannot write /dev/full: No space left on device"):
        log = StepLog(Path("/dev/full"), 3, rank=2)
        log.step(0, 1.0, 1.0, Updated(rate=0.1, norm=None, skipped=False), 0)
    with pytest.raises(UsageError, match="P0538: rank 1 cannot write x: No space"), writing(Path("x"), 1):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_waits_for_nobody(tmp_path: Path) -> None:
    """Neither for the reader of a pipe, nor for the end of a device that has none."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="P0538"):
        StepLog(tmp_path / "pipe", 3)
    StepLog(Path("/dev/zero"), 3, start=1).close()


def test_ranks_print_no_control_characters(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tell("a\x1b[31m\x9b b\nc\u2028")
    assert capsys.readouterr().err == "a\\x1b[31m\\x9b b\nc\\u2028\n"
    with Path("/dev/full").open("w") as gone:
        monkeypatch.setattr("sys.stderr", gone)
        tell("a terminal that is gone ends no training")
        os.dup2(os.open(os.devnull, os.O_WRONLY), gone.fileno())  # for what is left in its buffer


def test_a_terminal_that_is_gone_ends_no_training(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as terminal:
        log = StepLog(tmp_path / "log", 3, terminal)
        log.step(0, 1.0, 1.0, Updated(rate=0.1, norm=None, skipped=False), 0)
        log.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), terminal.fileno())  # for what is left in its buffer
    assert (tmp_path / "log").read_text().count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("can't start new thread"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
)
def test_no_memory(error: Exception) -> None:
    clock = Clock()
    clock.entering("0F1")
    clock.step = 3
    said = "P0537: rank 4 has not enough memory in 0F1 of step 3"
    with pytest.raises(UsageError, match=said) as raised, enough_memory("rank 4", clock):
        raise error
    assert raised.value.exit_code == 1
    with pytest.raises(RuntimeError, match="anything else"), enough_memory("rank 4", clock):
        raise RuntimeError("anything else")
    clock.rows = "9 rows came for this rank's experts of layers.0, where the mean is 4"
    with pytest.raises(UsageError, match=r"in 0F1 of step 3 \(9 rows .* of layers.0"), enough_memory("rank 4", clock):
        raise error
