"""Kills and stalls ranks of several trainings at random moments, and continues them: is the result the same?

    python tests/benchmarks/faults.py --kills 100 --stalls 30

Each kind of package (KINDS) is trained by processes under torchrun that save every few steps. A round starts, or
continues, a training and sends one rank SIGKILL or SIGSTOP: at a random moment from its first on or, every other time,
while a checkpoint is being written. The other ranks must say which one it was, and all processes must end, within 30
seconds; the next round must continue from a whole checkpoint. At last each training runs to its end, which must be, bit
by bit, that of one that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import partc
from partc.ir.mesh import Mesh
from partc.package.launch import local_environment, read_plan, torchrun_command
from partc.runtime.checkpoint.manifest import checkpoints, read
from tests.durable import TIED, trained, whole
from tests.runtime.test_death import rank_of

LIMIT = 30.0  # seconds in which the others must have stopped
PAUSE = "PARTC_FAULTS_PAUSE"  # seconds that the data of a step takes, so that there are not too many steps to repeat

KINDS: Mapping[str, Mapping[str, Any]] = {
    "dp zero 1": {"mesh": "dp=2", "zero": 1, "precision": "fp64"},
    "dp zero 3": {"mesh": "dp=2", "zero": 3, "precision": "fp64"},
    "pp 1f1b": {"mesh": "pp=2", "microbatches": 4, "precision": "fp64"},
    "pp zero-bubble": {"mesh": "pp=2", "microbatches": 4, "schedule": "zero-bubble"},
    "tp": {"mesh": "tp=2", "precision": "fp64"},
    "dp x pp x tp": {
        "mesh": "pp=2,dp=2,tp=2", "microbatches": 2, "precision": "bf16", "compress_grads": "int8", "zero": 1,
    },
}  # fmt: skip

_DATA = f"""

def data(step: int, batch: int = 8, seq: int = 6) -> dict[str, Tensor]:
    import os
    import time

    time.sleep(float(os.environ.get("{PAUSE}", "0")))
    ids = torch.randint(0, VOCABULARY, (batch, seq + 1), generator=torch.Generator().manual_seed(step))
    return {{"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}}
"""


@dataclass(slots=True, kw_only=True)
class Round:
    """The effect of one signal."""

    kind: str
    fault: str
    victim: int
    moment: str  # what the ranks were in, as far as can be seen
    seconds: float  # until all processes had ended
    named: bool  # the others said which rank it was
    lost: int  # steps done, but in no checkpoint
    output: str = field(repr=False)

    @property
    def survived(self) -> bool:
        return self.seconds <= LIMIT and self.named


def package(folder: Path, kind: str) -> Path:
    """The package of tests/models/tied.py with slow data."""
    build = folder / "build"
    if not build.exists():
        model = folder / "tied.py"
        model.write_text(TIED.read_text() + _DATA)
        partc.compile(model, **KINDS[kind]).write(build)
    return build


def campaign(folder: Path, kind: str, faults: Sequence[str], *, every: int, seed: int) -> Iterator[Round]:
    """Disturb and continue; then compare. Raises AssertionError where the end isn't that of an undisturbed run."""
    draw = random.Random(seed)
    folder.mkdir(exist_ok=True)
    build, save = package(folder, kind), folder / "save"
    ranks = Mesh.parse(read_plan(build)["mesh"]).size
    for number, fault in enumerate(faults):
        victim = draw.randrange(ranks)
        delay = None if number % 2 else draw.uniform(0.0, 9.0 if ranks < 4 else 25.0)
        yield _disturb(folder, kind, fault, victim, delay, every, draw.uniform(0.0, 0.01))
    steps = (read(checkpoints(save)[0]).step if checkpoints(save) else 0) + 3
    arguments = ("--steps", steps, "--save-every", 10**6)
    trained(build, *arguments, "--save", save, "--resume")
    trained(build, *arguments, "--save", folder / "undisturbed")
    mine, theirs = (whole(checkpoints(place)[0]) for place in (save, folder / "undisturbed"))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def _disturb(folder: Path, kind: str, fault: str, victim: int, delay: float | None, every: int, pause: float) -> Round:
    build, save, log = folder / "build", folder / "save", folder / "log"
    ranks = Mesh.parse(read_plan(build)["mesh"]).size
    before = read(checkpoints(save)[0]).step if checkpoints(save) else 0
    log.unlink(missing_ok=True)
    arguments = ["--steps", str(10**9), "--save", str(save), "--save-every", str(every), "--keep", "2", "--resume"]
    with tempfile.TemporaryFile() as output:
        command = torchrun_command(build, [*arguments, "--metrics", str(log)])
        environment = {**local_environment(), PAUSE: "0.05"}
        launcher = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        pids: list[int] = []
        try:
            places = _ranks(launcher, ranks)
            pids = list(places.values())
            if delay is None:
                _until_saving(save, log, before)
                delay = pause
            time.sleep(delay)
            assert launcher.poll() is None, _read(output)
            os.kill(places[victim], signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            hit = time.monotonic()
            done = max(0, _steps(log) - before)
            saving = any(save.glob(".step_*"))
            launcher.wait(timeout=3 * LIMIT)
            while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() - hit < 3 * LIMIT:
                time.sleep(0.1)
            seconds = time.monotonic() - hit
        finally:
            launcher.kill()
            launcher.wait()
            for pid in pids:
                if Path(f"/proc/{pid}").exists() and rank_of(pid) is not None:
                    os.kill(pid, signal.SIGKILL)
        text = _read(output)
    moment = "start-up" if not done else "saving" if saving else "training"
    said = re.search(
        rf"error P0505: .*\brank {victim} (died|failed|stalls)\b.*; rank (?!{victim}\b)\d+ stops, in \S", text
    )
    kept = read(checkpoints(save)[0]).step if checkpoints(save) else 0
    lost = max(0, before + done - kept) if done else 0
    return Round(
        kind=kind, fault=fault, victim=victim, moment=moment, seconds=seconds, named=said is not None, lost=lost, output=text
    )  # fmt: skip


def _read(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace")


def _ranks(launcher: subprocess.Popen[bytes], count: int) -> dict[int, int]:
    """Process ids by rank, as soon as all are there."""
    while launcher.poll() is None:
        found = {}
        try:
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
            found = {rank_of(int(pid)): int(pid) for pid in children}
        except OSError:
            pass
        known = {rank: pid for rank, pid in found.items() if rank is not None}
        if len(known) == count:
            return known
        time.sleep(0.01)
    raise RuntimeError("the launcher ended before its ranks began")


def _until_saving(save: Path, log: Path, before: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (_steps(log) > before + 2 and any(save.glob(".step_*"))):
        time.sleep(0.0005)


def _steps(log: Path) -> int:
    """The number of the last step in the log; steps count from 1."""
    lines = log.read_text().splitlines() if log.exists() else []
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except ValueError:  # half a line
            continue
    return 0


def table(rounds: Sequence[Round]) -> str:
    """One line for each kind of package and fault."""
    lines = [
        "| package | fault | tried | named, ended in 30 s | slowest, s | start-up, training, saving | most steps lost |"
    ]
    lines.append("|---|---|---:|---:|---:|---|---:|")
    for kind in dict.fromkeys(each.kind for each in rounds):
        for fault in ("kill", "stall"):
            mine = [each for each in rounds if (each.kind, each.fault) == (kind, fault)]
            if mine:
                moments = ", ".join(
                    str(sum(each.moment == moment for each in mine)) for moment in ("start-up", "training", "saving")
                )
                survived = sum(each.survived for each in mine)
                slowest, lost = max(each.seconds for each in mine), max(each.lost for each in mine)
                lines.append(f"| {kind} | {fault} | {len(mine)} | {survived} | {slowest:.1f} | {moments} | {lost} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stalls", type=int, default=30)
    parser.add_argument("--kind", choices=KINDS, action="append", help="all by default")
    parser.add_argument("--every", type=int, default=2, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rounds into this file, too")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="partc-faults-"))
    kinds = arguments.kind or list(KINDS)
    rounds: list[Round] = []
    for place, kind in enumerate(kinds):
        counts = {
            fault: count // len(kinds) + (place < count % len(kinds))
            for fault, count in (("kill", arguments.kills), ("stall", arguments.stalls))
        }
        faults = [fault for fault, count in counts.items() for _ in range(count)]
        random.Random(arguments.seed + place).shuffle(faults)
        seed = arguments.seed + 1000 * list(KINDS).index(kind)
        for each in campaign(folder / kind.replace(" ", "_"), kind, faults, every=arguments.every, seed=seed):
            rounds.append(each)
            print(
                f"{len(rounds):3}  {kind}: rank {each.victim}, {each.fault} in {each.moment:<8}  all ended after "
                f"{each.seconds:4.1f} s, {'naming it' if each.named else 'without a name'}; {each.lost} steps lost",
                flush=True,
            )
            if not each.survived:
                print(each.output)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps([asdict(each) for each in rounds]))
        print(f"{kind}: the end is that of an undisturbed run, bit by bit", flush=True)
    print(table(rounds))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
