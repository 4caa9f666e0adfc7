"""Under torchrun: a dead rank is restarted and training continues; two agents run one training."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from partc.package.launch import local_environment, torchrun_command
from partc.runtime.checkpoint.manifest import checkpoints, read
from tests.benchmarks.faults import campaign
from tests.durable import trained, whole
from tests.runtime.test_death import package, rank_of

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def same_end(build: Path, folder: Path, save: Path, steps: int) -> None:
    """The training's end is that of one which nobody disturbed."""
    assert read(checkpoints(save)[0]).step == steps
    trained(build, "--steps", steps, "--save", folder / "undisturbed")
    mine, theirs = whole(checkpoints(save)[0]), whole(checkpoints(folder / "undisturbed")[0])
    assert mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)


def until(done: Path) -> None:
    deadline = time.monotonic() + 60
    while not done.exists():
        assert time.monotonic() < deadline, f"no {done.name}"
        time.sleep(0.01)


def slow(build: Path) -> Path:
    """Steps of a twentieth of a second: there is time to kill somebody in between."""
    stage = build / "stages" / "stage_0.py"
    text, there = stage.read_text(), "    def forward(self"
    assert text.count(there) == 1
    waits = (
        "    def prepare(self, batch: dict[str, Tensor]) -> None:\n        import time\n\n        time.sleep(0.05)\n\n"
    )
    stage.write_text(text.replace(there, f"{waits}{there}"))
    return build


def ranks(launcher: int) -> dict[int | None, int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return {rank_of(int(pid)): int(pid) for pid in children}


def arguments(save: Path, steps: int) -> list[str]:
    return ["--steps", str(steps), "--save", str(save), "--save-every", "5", "--resume"]


def test_torchrun_starts_again(tmp_path: Path) -> None:
    build, save = slow(package(tmp_path, dp=1)), tmp_path / "save"
    command = torchrun_command(build, arguments(save, 30))
    command.insert(command.index("--standalone"), "--max-restarts=2")
    with (tmp_path / "output").open("wb") as output:
        launcher = subprocess.Popen(command, env=local_environment(), stdout=output, stderr=output)
    try:
        until(save / "step_00000005")
        os.kill(ranks(launcher.pid)[1], signal.SIGKILL)
        assert launcher.wait(timeout=90) == 0
    finally:
        launcher.kill()
    text = (tmp_path / "output").read_text()
    assert "rank 1 died" in text and "continuing from" in text, text
    same_end(build, tmp_path, save, 30)


def test_two_agents(tmp_path: Path) -> None:
    build, save = slow(package(tmp_path, dp=1)), tmp_path / "save"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"]
    launch += ["--rdzv-backend=c10d", f"--rdzv-endpoint={place}", "--rdzv-id=partc", "--local-addr=127.0.0.1"]
    agents = []
    for number in range(2):
        with (tmp_path / f"{number}.txt").open("wb") as output:
            command = [*launch, str(build / "train.py"), *arguments(save, 20)]
            agents.append(subprocess.Popen(command, env=local_environment(), stdout=output, stderr=output))
    try:
        until(save / "step_00000005")
        os.kill(next(pid for pid in ranks(agents[1].pid).values()), signal.SIGKILL)
        codes = [agent.wait(timeout=120) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    text = "".join((tmp_path / f"{number}.txt").read_text() for number in range(2))
    assert codes == [0, 0], text
    assert "continuing from" in text, text
    same_end(build, tmp_path, save, 20)


def test_a_few_kills(tmp_path: Path) -> None:
    """The benchmark `faults.py`, in small: one at any moment, one while a checkpoint is written."""
    for each in campaign(tmp_path / "dp", "dp zero 1", ["kill", "kill"], every=2, seed=3):
        assert each.survived and each.lost <= 2, each.output
