"""Kills ranks of one training at random moments, and continues it each time: what is lost, and is the result the same?

    python tests/benchmarks/faults.py --kills 50

Two ranks under torchrun save every few steps. Each round starts (or continues) the training and kills one
rank with SIGKILL: at a random moment from its first on, or, every other time, while a checkpoint is being
written. The other must stop and say which rank died; the next round must continue from a whole checkpoint.
At last the training runs to its end, which must be, bit by bit, that of one that was never killed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from partc.launch import local_environment, torchrun_command
from partc.runtime.manifest import checkpoints, read
from tests.durable import trained, whole
from tests.test_runtime_death import package, rank_of

LIMIT = 30.0  # seconds in which the others must have stopped


@dataclass(slots=True)
class Round:
    """What one kill did."""

    victim: int
    moment: str  # what the ranks were in, as far as can be seen
    seconds: float  # until the others had stopped
    named: bool  # they said which rank died
    lost: int  # steps done, but in no checkpoint
    output: str = field(repr=False)

    @property
    def survived(self) -> bool:
        return self.seconds <= LIMIT and (self.named or self.moment == "start-up")


def campaign(folder: Path, *, kills: int, every: int, seed: int) -> Iterator[Round]:
    """Kill and continue; then compare. Raises AssertionError where the end isn't that of an undisturbed run."""
    draw = random.Random(seed)
    build = package(folder, dp=1)
    save, log = folder / "save", folder / "log"
    for number in range(kills):
        victim = draw.randrange(2)
        delay = None if number % 2 else draw.uniform(0.0, 9.0)
        yield _kill(build, save, log, victim, delay, every, draw.uniform(0.0, 0.01))
    steps = (read(checkpoints(save)[0]).step if checkpoints(save) else 0) + 3
    arguments = ("--steps", steps, "--save-every", 10**6)
    trained(build, *arguments, "--save", save, "--resume")
    trained(build, *arguments, "--save", folder / "undisturbed")
    mine, theirs = (whole(checkpoints(place)[0]) for place in (save, folder / "undisturbed"))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def _kill(build: Path, save: Path, log: Path, victim: int, delay: float | None, every: int, pause: float) -> Round:
    before = read(checkpoints(save)[0]).step if checkpoints(save) else 0
    log.unlink(missing_ok=True)
    arguments = ["--steps", str(10**9), "--save", str(save), "--save-every", str(every), "--keep", "2", "--resume"]
    with tempfile.TemporaryFile() as output:
        command = torchrun_command(build, [*arguments, "--metrics", str(log)])
        launcher = subprocess.Popen(command, env=local_environment(), stdout=output, stderr=output)
        try:
            ranks = _ranks(launcher.pid)
            if delay is None:
                _until_saving(save, log)
                delay = pause
            time.sleep(delay)
            os.kill(ranks[victim], signal.SIGKILL)
            killed = time.monotonic()
            done = _steps(log)
            saving = any(save.glob(".step_*"))
            launcher.wait(timeout=2 * LIMIT)
            seconds = time.monotonic() - killed
        finally:
            launcher.kill()
            launcher.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    moment = "start-up" if not done else "saving" if saving else "training"
    named = (
        re.search(rf"error P0505: .*rank {victim} (died|failed)\b.*; rank {1 - victim} stops, in \S", text) is not None
    )
    kept = read(checkpoints(save)[0]).step if checkpoints(save) else 0
    return Round(victim, moment, seconds, named, max(0, (before + done - kept) if done else 0), text)


def _ranks(launcher: int) -> dict[int, int]:
    """Process ids by rank, as soon as all are there."""
    while True:
        try:
            children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
            found = {rank_of(int(pid)): int(pid) for pid in children}
        except OSError:
            found = {}
        if {0, 1} <= found.keys():
            return {rank: pid for rank, pid in found.items() if rank is not None}
        time.sleep(0.01)


def _until_saving(save: Path, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (_steps(log) > 2 and any(save.glob(".step_*"))):
        time.sleep(0.0005)


def _steps(log: Path) -> int:
    """Steps of this run that were logged."""
    return log.read_text().count("\n") if log.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--every", type=int, default=2, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="partc-faults-"))
    rounds = []
    for number, each in enumerate(campaign(folder, **vars(arguments)), 1):
        rounds.append(each)
        print(
            f"{number:3}  rank {each.victim} killed in {each.moment:<8}  others stopped after {each.seconds:4.1f} s, "
            f"{'naming it' if each.named else 'without a name'}; {each.lost} steps lost",
            flush=True,
        )
        if not each.survived:
            print(each.output)
    survived = [each for each in rounds if each.survived]
    moments = {moment: sum(each.moment == moment for each in rounds) for moment in ("start-up", "training", "saving")}
    print(f"tried {len(rounds)} ({', '.join(f'{count} in {moment}' for moment, count in moments.items())}),")
    print(f"survived {len(survived)}, lost {len(rounds) - len(survived)}; the end is that of an undisturbed run")
    print(
        f"saved every {arguments.every} steps; slowest stop {max(each.seconds for each in rounds):.1f} s; at most {max(each.lost for each in rounds)} steps lost"
    )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
