"""Peak memory of ranks, predicted and measured, next to torch's own parallelism: `python tests/benchmarks/memory.py`.

The model is that of step_time.py. Both sides are processes over gloo, each under a meter that counts the memory of
all tensors from their creation to their end (tests/meter.py): it knows of no account. Of a step after the first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.benchmarks.step_time import EXAMPLE, OPTIONS, SIZE  # noqa: E402
from tests.meter import later, launched, measured  # noqa: E402

STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    mesh: str
    flags: str = ""
    arguments: tuple[str, ...] = ()  # of train.py
    peer: str = ""  # as workers/peers.py knows it
    what: str = ""


CASES = (
    Case(mesh="dp=2", peer="ddp", what="DDP"),
    Case(mesh="dp=2", flags="--zero 1"),
    Case(mesh="dp=2", flags="--zero 2", peer="fsdp2", what="FSDP2, kept for backward"),
    Case(mesh="dp=2", flags="--zero 3", peer="fsdp3", what="FSDP2"),
    Case(mesh="dp=2", flags="--zero 3 --recompute selective"),
    Case(mesh="dp=2", flags="--zero 3 --recompute full"),
    Case(mesh="dp=2", flags="--recompute 400MB"),
    Case(mesh="dp=2", flags="--precision bf16"),
    Case(mesh="dp=2", flags="--precision bf16 --zero 3"),
    Case(mesh="dp=2", flags="--microbatches 4", arguments=("--accumulate", "2", "--clip", "1.0")),
    Case(mesh="dp=2", arguments=("--optimizer", "sgd")),
    Case(mesh="tp=2", peer="sp", what="DTensor, sequence-parallel"),
    Case(mesh="pp=2", flags="--microbatches 4", peer="pp", what="Schedule1F1B"),
    Case(mesh="pp=2", flags="--microbatches 4 --schedule gpipe"),
    Case(mesh="pp=2", flags="--microbatches 4 --schedule interleaved"),
    Case(mesh="pp=2", flags="--microbatches 4 --schedule zero-bubble"),
    Case(mesh="pp=2", flags="--microbatches 4 --schedule zbv"),
    Case(mesh="pp=2", flags="--microbatches 4 --schedule dualpipe-v"),
)


def predicted(package: Path, model: Path, case: Case) -> list[int]:
    """By rank, what `partc memory` says."""
    command = [sys.executable, "-m", "partc", "memory", str(package), "--json"]
    if "sgd" in case.arguments:
        command += ["--optimizer", "sgd"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["ranks"]
    return [rank["peak"] for rank in found]


def row(case: Case, folder: Path) -> str:
    model, package = folder / "gpt.py", folder / "build"
    model.write_text(EXAMPLE.read_text() + SIZE)
    options = [word for option in OPTIONS for word in ("-D", option)]
    command = [sys.executable, "-m", "partc", "compile", str(model), "--mesh", case.mesh, *options, *case.flags.split()]
    subprocess.run([*command, "-o", str(package)], check=True, stdout=subprocess.DEVNULL)
    said = predicted(package, model, case)
    held = measured(package, 2, case.arguments, steps=STEPS)
    of_rank = said if len(said) == 2 else said * 2
    ratios = [want / got for want, got in zip(of_rank, held, strict=True)]
    theirs = peer(case, package, folder) if case.peer else []
    beside = f"{case.what} | {_mib(theirs)} | {max(held) / max(theirs):.2f}" if theirs else " | | "
    flags = " ".join(filter(None, (case.flags, *case.arguments)))
    return (
        f"| {case.mesh}{f', `{flags}`' if flags else ''} | {_mib(of_rank)} | {_mib(held)} "
        f"| {', '.join(f'{ratio:.4f}' for ratio in ratios)} | {beside} |"
    )


def peer(case: Case, package: Path, folder: Path) -> list[int]:
    worker, report = HERE / "workers" / "held.py", folder / "theirs"
    launched([str(worker), case.peer, str(package), str(report), str(STEPS), "1"], 2, timeout=600)
    peaks = [json.loads((report / f"meter_{rank:03d}.json").read_text())["peaks"] for rank in range(2)]
    return [later(each, ()) for each in peaks]


def _mib(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size / 2**20:.1f}" for size in sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", type=int, help="by number, from 0; all by default")
    arguments = parser.parse_args()
    print("| package | predicted, MiB a rank | measured | ratio | peer | measured | partc's part of it |")
    print("|---|---:|---:|---:|---|---:|---:|", flush=True)
    for index, case in enumerate(CASES):
        if not arguments.cases or index in arguments.cases:
            with tempfile.TemporaryDirectory() as folder:
                print(row(case, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
