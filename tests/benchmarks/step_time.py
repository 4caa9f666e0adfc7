"""A step of the emitted package against torch's own parallelism: `python tests/benchmarks/step_time.py`.

The model is examples/gpt.py's at a size where computation matters on a CPU, or a recommender (clicks.py). Both sides of a case are two
processes (or `--ranks`) of one thread over gloo. They take turns, a round of steps each, so that whatever else the machine
does meets both; a side that waits does nothing. Times leave out making the batch, and the first round.
CPU time is that of all ranks together: what is left of the difference on a machine with other work to do.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.network import Host  # noqa: E402

EXAMPLE = HERE.parents[1] / "examples" / "gpt.py"
CLICKS = HERE / "clicks.py"
SIZE = """
CONFIGS["bench"] = Config(width=512, depth=5, heads=8, kv_heads=4, hidden=1408, vocabulary=4096)
CONFIGS["thin"] = Config(width=64, depth=4, heads=2, kv_heads=1, hidden=128, vocabulary=256)
"""
MIXTURE = """
class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.router = nn.Linear(config.width, 8, bias=False)
        self.up = nn.Parameter(torch.randn(8, config.width, config.hidden) * config.width**-0.5)
        self.down = nn.Parameter(torch.randn(8, config.hidden, config.width) * config.hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(tokens)
        for expert in range(8):
            row, slot = torch.where(chosen == expert)
            found = F.silu(tokens[row] @ self.up[expert]) @ self.down[expert]
            out.index_add_(0, row, found * scores[row, slot, None])
        return out.reshape(x.shape)
"""
OPTIONS = ("size=bench", "batch=8", "seq=256")
LONG = ("size=bench", "batch=1", "seq=2048")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    peer: str  # as workers/peers.py knows it
    what: str
    axis: str
    microbatches: int = 1
    zero: int = 0
    options: tuple[str, ...] = ()  # others of `partc compile`
    tolerance: float = 1e-3  # relative, of the losses against the peer's
    workers: tuple[str, str] = ("package.py", "peers.py")
    sizes: tuple[str, ...] = OPTIONS  # options of the model file
    example: Path = EXAMPLE
    model: str = SIZE  # lines after those of the example


CASES = (
    Case(peer="ddp", what="DDP", axis="dp"),
    Case(peer="ddp", what="DDP", axis="dp", zero=1),
    Case(peer="fsdp2", what="FSDP2, kept for backward", axis="dp", zero=2),
    Case(peer="fsdp3", what="FSDP2", axis="dp", zero=3),
    Case(peer="tp", what="DTensor", axis="tp"),
    Case(peer="sp", what="DTensor, sequence-parallel", axis="tp"),
    Case(peer="pp", what="Schedule1F1B", axis="pp", microbatches=4),
    Case(peer="ring", what="torch's ring attention, DDP", axis="cp", sizes=LONG),
    Case(peer="ulysses", what="all-to-all to heads, DDP", axis="cp", sizes=LONG),
    Case(peer="ep", what="all-to-all of rows, DDP", axis="ep", model=SIZE + MIXTURE),
    Case(
        peer="tables",
        what="whole tables, all-to-all, DDP",
        axis="dp",
        options=("--optimizer", "adagrad"),
        sizes=(),
        model="",
        example=CLICKS,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One side: milliseconds a step of each round and of the fastest step, the first round left out; bytes a rank."""

    rounds: tuple[float, ...]
    fastest: float
    cpu: float  # of all ranks, milliseconds a step
    peak_bytes: tuple[int, ...]
    losses: tuple[float, ...]

    @property
    def mib(self) -> str:
        return ", ".join(f"{size / 2**20:.0f}" for size in self.peak_bytes)


class Side:
    """Processes that wait between rounds."""

    def __init__(
        self, worker: str, side: str, package: Path, report: Path, hosts: Sequence[Host], rounds: int, steps: int
    ) -> None:
        ranks = len(hosts)
        self.report, self.ranks, self.steps = report, ranks, steps
        self.cpu: list[float] = []  # seconds of all ranks at the start of each round
        command = [sys.executable, str(HERE / "workers" / worker), side, str(package), str(report)]
        command += [str(rounds), str(steps)]
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        shared = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(port)}
        shared |= {"WORLD_SIZE": str(ranks)}
        places = [[other.address for other in hosts[:rank]].count(host.address) for rank, host in enumerate(hosts)]
        mates = [[other.address for other in hosts].count(host.address) for host in hosts]
        self.processes = [
            subprocess.Popen(
                [*host.prefix, *command],
                env={
                    **os.environ,
                    **shared,
                    **host.environment,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(places[rank]),
                    "LOCAL_WORLD_SIZE": str(mates[rank]),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(report.parent / f"{report.name}.{rank}.log").open("w"),
                text=True,
            )
            for rank, host in enumerate(hosts)
        ]

    def wait(self) -> None:
        """Until every rank is ready for its next round."""
        self.cpu.append(0.0)
        for process in self.processes:
            assert process.stdout is not None
            while not (line := process.stdout.readline()).startswith("ready "):
                if not line:
                    self.stop()
                    logs = (self.report.parent / f"{self.report.name}.{rank}.log" for rank in range(self.ranks))
                    raise SystemExit("\n".join(log.read_text()[-3000:] for log in logs))
            self.cpu[-1] += float(line.split()[1])

    def go(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    def finish(self) -> Measured:
        for process in self.processes:
            process.communicate()
        reports = [json.loads((self.report / f"rank_{rank:03d}.json").read_text()) for rank in range(self.ranks)]
        totals = [_rounds(report["step_seconds"], self.steps) for report in reports]
        steps = [max(times) for times in zip(*(report["step_seconds"] for report in reports), strict=True)]
        return Measured(
            fastest=1000 * min(steps[self.steps :]),
            cpu=1000 * (self.cpu[-1] - self.cpu[1]) / (self.steps * (len(self.cpu) - 2)),
            rounds=tuple(1000 * max(times) / self.steps for times in zip(*totals, strict=True))[1:],
            peak_bytes=tuple(report["peak_bytes"] for report in reports),
            losses=tuple(next(report["losses"] for report in reports if report["losses"])),
        )

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _rounds(seconds: list[float], steps: int) -> list[float]:
    return [sum(seconds[start : start + steps]) for start in range(0, len(seconds), steps)]


def measure(case: Case, folder: Path, hosts: Sequence[Host], rounds: int, steps: int) -> tuple[Measured, Measured]:
    """The package's and the peer's, in turns, with a rank on each host; the losses of both have to agree."""
    model, package = folder / case.example.name, folder / case.peer / "build"
    model.write_text(case.example.read_text() + case.model)
    options = [word for option in case.sizes for word in ("-D", option)]
    command = [sys.executable, "-m", "partc", "compile", str(model), "--mesh", f"{case.axis}={len(hosts)}", *options]
    command += [*case.options, "--microbatches", str(case.microbatches), "--zero", str(case.zero), "-o", str(package)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    turns = rounds + 1
    ours = Side(case.workers[0], "package", package, package.parent / "ours", hosts, turns, steps)
    theirs = Side(case.workers[1], case.peer, package, package.parent / "theirs", hosts, turns, steps)
    try:
        ours.wait()
        theirs.wait()
        for turn in range(turns):
            for side in (ours, theirs) if turn % 2 else (theirs, ours):
                side.go()
                if turn + 1 < turns:
                    side.wait()
                else:
                    for process in side.processes:
                        process.wait()
        found = ours.finish(), theirs.finish()
    finally:
        ours.stop()
        theirs.stop()
    for step, (mine, other) in enumerate(zip(found[0].losses, found[1].losses, strict=True)):
        if abs(mine - other) > case.tolerance * abs(other):
            raise SystemExit(f"{case.what}: the losses of step {step} are {mine} and {other}: not the same model")
    return found


def row(case: Case, ranks: int, ours: Measured, theirs: Measured) -> str:
    ratios = sorted(mine / other for mine, other in zip(ours.rounds, theirs.rounds, strict=True))
    return (
        f"| {case.axis}={ranks}{f', ZeRO {case.zero}' if case.zero else ''} | {case.what} | {statistics.median(ours.rounds):.0f} | {statistics.median(theirs.rounds):.0f} "
        f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) | {ours.fastest / theirs.fastest:.2f} "
        f"| {ours.cpu:.0f} | {theirs.cpu:.0f} | {ours.cpu / theirs.cpu:.2f} | {ours.mib} | {theirs.mib} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(case.peer for case in CASES)}; all by default")
    parser.add_argument("--ranks", type=int, default=2, help="processes of each side")
    parser.add_argument("--rounds", type=int, default=7, help="after the first, at least 2")
    parser.add_argument("--steps", type=int, default=3, help="in each round")
    arguments = parser.parse_args()
    print(
        "| mesh | peer | partc, ms | peer, ms | ratio by rounds (lowest to highest) | of the fastest steps "
        "| partc, CPU ms | peer, CPU ms | ratio | partc, MiB a rank | peer, MiB a rank |"
    )
    print("|---|---|---:|---:|---|---:|---:|---:|---:|---|---|", flush=True)
    for case in CASES:
        if not arguments.cases or case.peer in arguments.cases:
            with tempfile.TemporaryDirectory() as folder:
                found = measure(case, Path(folder), [Host()] * arguments.ranks, arguments.rounds, arguments.steps)
                print(row(case, arguments.ranks, *found), flush=True)


if __name__ == "__main__":
    main()
