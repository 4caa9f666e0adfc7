"""Two runs never save into one folder at the same time, and a killed run does not block the next."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from partc.package.launch import local_environment, torchrun_command
from partc.runtime.checkpoint.manifest import checkpoints
from partc.runtime.errors import UsageError
from partc.runtime.processes.agreement import Together
from partc.runtime.processes.ownership import NAME, claim_folder
from partc.runtime.torch_private import lone_store
from tests.durable import build, train

HOLDER = """
import sys, time
from pathlib import Path
from partc.runtime.processes.ownership import claim_folder
from partc.runtime.processes.agreement import Together
from partc.runtime.torch_private import lone_store
claim_folder(Path(sys.argv[1]), Together(lone_store(), 0, 1), timeout=1, say=print)
print("holds", flush=True)
time.sleep(60)
"""


def alone(folder: Path, *, timeout: float = 0.2, said: list[str] | None = None) -> None:
    say = (lambda line: None) if said is None else said.append
    claim_folder(folder, Together(lone_store(), 0, 1), timeout=timeout, say=say)()


def refused(folder: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        alone(folder)
    assert caught.value.alike
    return caught.value


def test_a_process_that_is_killed_lets_go(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
        error = refused(tmp_path)
        assert error.code == "P0539" and f"process {holder.pid} on {socket.gethostname()!r}" in error.cause
        done = train(build(tmp_path, "dp=2"), "--steps", 1, "--save", tmp_path, "--timeout", 1)
        assert done.returncode == 2 and "error P0539" in done.stderr and not checkpoints(tmp_path)
    finally:
        holder.kill()
        holder.wait()
    alone(tmp_path)
    alone(tmp_path)  # and so does one that has ended its run


def test_the_lock_waits_for_the_ranks_of_a_run_that_ends(tmp_path: Path) -> None:
    script = HOLDER.replace("time.sleep(60)", "time.sleep(0.5)")
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
    said: list[str] = []
    alone(tmp_path, timeout=60, said=said)
    assert len(said) == 1 and "waiting for another run" in said[0] and holder.wait(10) == 0


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"host": 3, "pid": "x"}', "\ud800\0" * 9, '{"a": ' * 5000])
def test_whatever_stands_in_the_file(tmp_path: Path, text: str) -> None:
    let_go = claim_folder(tmp_path, Together(lone_store(), 0, 1), timeout=1, say=print)
    (tmp_path / NAME).write_bytes(text.encode("utf-8", "surrogatepass"))
    assert refused(tmp_path).cause.startswith("another run saves into")
    let_go()
    alone(tmp_path)
    assert json.loads((tmp_path / NAME).read_text()) == {"host": socket.gethostname(), "pid": os.getpid()}


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / NAME).symlink_to(tmp_path / "mine")
    assert refused(tmp_path / "save").code == "P0526" and (tmp_path / "mine").read_text() == "precious"


@pytest.mark.slow
@pytest.mark.processes
def test_two_runs_of_real_processes(tmp_path: Path) -> None:
    """The second is refused while any rank of the first lives; killed, the first is resumed."""
    package, save, log = build(tmp_path, "dp=2"), tmp_path / "save", tmp_path / "log"
    arguments = ["--steps", 1_000_000, "--save", save, "--save-every", 2]
    command = torchrun_command(package, [str(word) for word in (*arguments, "--metrics", log)])
    first = subprocess.Popen(command, env=local_environment(), start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not checkpoints(save):
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.1)
        owner = json.loads((save / NAME).read_text())["pid"]
        second = train(package, *arguments, "--resume", "--timeout", 4, real=True)
        assert second.returncode and f"error P0539: another run (process {owner} on" in second.stderr
        assert first.poll() is None
        # Rank 0 alone dies by this; the other one, which finds out later, still keeps runs out.
        os.kill(owner, signal.SIGKILL)
        third = train(package, "--steps", 4, "--save", save, "--save-every", 2, "--resume", real=True)
        assert third.returncode == 0 and "continuing from" in third.stderr, third.stderr
    finally:
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
        first.wait()
