"""On a machine with a GPU: kernels against PyTorch, their bytes a second against a copy, training against peers.

    python -m tests.gpu                       # all of it
    python -m tests.gpu --part bandwidth      # or correctness, verify, training

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

from partc.verify import verify as compared
from tests.gpu import bandwidth, training

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("correctness", "verify", "bandwidth", "training")


@click.command()
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS)
@click.option("--steps", type=int, default=30, show_default=True, help="of training that are timed, after 10 others")
def main(parts: tuple[str, ...], steps: int) -> None:
    """Everything, or some parts."""
    if not torch.cuda.is_available():
        raise click.ClickException("there is no GPU here")
    import triton

    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, Python {sys.version.split()[0]}")
    good = [{"correctness": correctness, "verify": verify}[part]() for part in parts if part in PARTS[:2]]
    if "bandwidth" in parts:
        good.append(bandwidth.table())
    if "training" in parts:
        good.append(training.table(steps))
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
    for precision in ("fp64", "fp32"):
        with tempfile.TemporaryDirectory() as folder:
            build = str(Path(folder) / "build")
            partc = [sys.executable, "-m", "partc"]
            compiled = [*partc, "compile", "examples/gpt.py", "--mesh", "1", "--kernels", "triton"]
            done = subprocess.run([*compiled, "--precision", precision, "-o", build], cwd=ROOT)
            good = good and done.returncode == 0
            good = good and subprocess.run([*partc, "verify", build], cwd=ROOT).returncode == 0
            if good:
                updated = compared(Path(build), optimizer="adamw", lr=1e-3, clip=0.1, accumulate=2)
                print(f"by AdamW, clipped: {updated.worst}")
                good = updated.ok
    return good


if __name__ == "__main__":
    main()
