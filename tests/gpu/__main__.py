"""On a machine with a GPU: kernels against PyTorch, their bytes a second against a copy, training against peers.

    python -m tests.gpu                       # all of it
    python -m tests.gpu --part bandwidth      # or correctness, verify, graphs, training
    python -m tests.gpu --part training --only "GPT-2 124M, liger" --only "GPT-2 124M, partc"

Nothing in here is cached or stored: every figure is of this run. Exit code 1 where something is wrong or too slow.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import torch

from partc.runtime.tensors import load
from partc.verify import relative_error
from partc.verify import verify as compared
from tests.gpu import bandwidth, training

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("correctness", "verify", "graphs", "bandwidth", "training")


@click.command()
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS)
@click.option("--steps", type=int, default=30, show_default=True, help="of training that are timed, after 10 others")
@click.option("--only", multiple=True, help="rows of the training table that have this in their names")
def main(parts: tuple[str, ...], steps: int, only: tuple[str, ...]) -> None:
    """Everything, or some parts."""
    if not torch.cuda.is_available():
        raise click.ClickException("there is no GPU here")
    import triton

    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, Python {sys.version.split()[0]}")
    checks = {"correctness": correctness, "verify": verify, "graphs": graphs}
    good = [checks[part]() for part in parts if part in checks]
    if "bandwidth" in parts:
        good.append(bandwidth.table())
    if "training" in parts:
        good.append(training.table(steps, only))
    sys.exit(0 if all(good) else 1)


def correctness() -> bool:
    """The kernels' own tests, with the GPU in the interpreter's place."""
    print("\n# Kernels against PyTorch in fp64", flush=True)
    names = (
        *("kernels", "kernel_rows", "kernel_cross_entropy", "kernel_dropout", "kernel_embedding", "kernel_places"),
        *("kernel_adamw", "kernel_compression", "tuning"),
    )
    tests = [f"tests/test_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *tests]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}).returncode == 0


def verify() -> bool:
    """Packages on one GPU against the single-device model."""
    print("\n# Packages against the single-device model", flush=True)
    good = True
    for precision in ("fp64", "fp32", "bf16"):
        with tempfile.TemporaryDirectory() as folder:
            build = str(Path(folder) / "build")
            partc = [sys.executable, "-m", "partc"]
            compiled = [*partc, "compile", "examples/gpt.py", "--mesh", "1", "--kernels", "triton"]
            done = subprocess.run([*compiled, "--precision", precision, "-o", build], cwd=ROOT)
            good = good and done.returncode == 0
            good = good and subprocess.run([*partc, "verify", build], cwd=ROOT).returncode == 0
            if good and precision != "bf16":
                updated = compared(Path(build), optimizer="adamw", lr=1e-3, clip=0.1, accumulate=2)
                print(f"by AdamW, clipped: {updated.worst}")
                good = updated.ok
    return good


def graphs() -> bool:
    """Steps that are repeated from CUDA graphs against steps that are done: what each leaves behind."""
    print("\n# CUDA graphs against the same package without", flush=True)
    good = True
    for precision, allowed in (("fp64", 1e-10), ("fp16", 0.02)):
        with tempfile.TemporaryDirectory() as folder:
            build = Path(folder) / "build"
            partc = [sys.executable, "-m", "partc", "compile", "tests/models/noisy.py", "--mesh", "1"]
            made = [*partc, "--microbatches", "2", "--precision", precision, "--kernels", "triton", "-o", str(build)]
            train = [sys.executable, str(build / "train.py"), "--steps", "12", "--no-tuning", "--clip", "0.1"]
            train += ["--accumulate", "3", "--warmup", "5", "--lr-schedule", "cosine"]
            runs = {"--no-cuda-graphs": Path(folder) / "done", "--cuda-graphs": Path(folder) / "repeated"}
            commands = [made, *([*train, how, "--record", str(record)] for how, record in runs.items())]
            if any(subprocess.run(command, cwd=ROOT).returncode for command in commands):
                return False
            worst, where = apart(*runs.values())
            print(f"{precision}: at most {worst:.1e} apart, at {where}")
            good = good and worst <= allowed
    return good


def apart(one: Path, other: Path) -> tuple[float, str]:
    """The largest difference of two recorded runs, as a share of its tensor's largest number, and where it is."""
    found = [(0.0, "none")]
    for file in sorted(one.iterdir()):
        mine, theirs = load(file)[0], load(other / file.name)[0]
        for name, x in mine.items():
            if x.isfinite().all() or not torch.equal(x.isfinite(), theirs[name].isfinite()):  # fp16 overflows alike
                found.append((relative_error(x, theirs[name], float(x.abs().max())), f"{name} in {file.name}"))
    return max(found)


if __name__ == "__main__":
    main()
