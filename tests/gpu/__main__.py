"""On a machine with a GPU: kernels against PyTorch, packages against their models, then speed against peers.

    python -m tests.gpu --list                 # the parts, in the order in which they are worth their time
    python -m tests.gpu                        # all of them
    python -m tests.gpu --part nccl --part verify --out results
    python -m tests.gpu --part gpt2 --only "partc, triton"

A part ends within its seconds, under ten minutes, whatever hangs in it: rows that found no time say so. Results go into
`gpu.md` and `gpu.jsonl` of --out, or of the folder that $OUT names, row by row. Nothing is cached: every figure is of
this run. Exit code 1 where something is wrong or too slow; what cannot be had here is skipped by name.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch

from partc.ir.mesh import Mesh
from partc.package.comparison import relative_error
from partc.runtime.checkpoint.safetensors import load
from tests.gpu import bandwidth, packages, training
from tests.gpu.commands import PARTC, ROOT, done
from tests.gpu.results import Deadline, Results, folder_of

PLACES = 8  # processes that compile and run kernels' tests side by side


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of work, with the seconds that it may take."""

    what: str
    seconds: int
    run: Callable[[Results, Deadline, tuple[str, ...]], bool]


def tests(names: tuple[str, ...], results: Results, deadline: Deadline, only: tuple[str, ...]) -> bool:
    """The kernels' own tests, with the GPU in the interpreter's place."""
    beside = ["-n", str(PLACES)] if importlib.util.find_spec("xdist") else ["-p", "no:xdist"]
    good = True
    results.table("Tests on the GPU", "tests", "result")
    for name in names:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--maxfail=20",
            "--tb=short",
            "--no-header",
            *beside,
            *(["-p", "no:benchmark"] if importlib.util.find_spec("pytest_benchmark") else []),
            f"tests/kernels/test_{name}.py",
        ]
        why = done(command, deadline.left, {"TRITON_INTERPRET": "0"}, show=True)
        results.row(name, why or "passed")
        good = good and not why
    return good


def marked(results: Results, deadline: Deadline, only: tuple[str, ...]) -> bool:
    """Tests that need a device and no kernels."""
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:xdist", *files]
    why = done(command, deadline.left, show=True)
    results.table("Tests of the runtime on the GPU", "tests", "result")
    results.row("-m gpu", why or "passed")
    return not why


def nccl(results: Results, deadline: Deadline, only: tuple[str, ...]) -> bool:
    """Groups of NCCL's on one GPU; packages on several, where there are several."""
    results.table("NCCL", "what", "result")
    why = done([sys.executable, "-m", "tests.gpu.nccl"], min(120, deadline.left), show=True)
    results.row("a group of one: options, both streams, recordings, shutdown", why or "works")
    good = not why
    count = torch.cuda.device_count()
    meshes = {
        "dp=2": (), "tp=2": (), "pp=2": (), "dp=2 --zero 3": ("--zero", "3"), "dp=2 --cuda-graphs": ("--cuda-graphs",),
        "2x2x1": (), "1x2x2": (), "2x2x2": (),
    }  # fmt: skip
    for name, options in meshes.items():
        mesh = name.split()[0]
        ranks = Mesh.parse(mesh).size
        if ranks > count:
            results.row(name, f"skipped: {ranks} GPUs, {count} here")
            continue
        with tempfile.TemporaryDirectory() as folder:
            build = str(Path(folder) / "build")
            micro = ("--microbatches", "4") if "pp" in mesh or "x" in mesh else ()
            made = [*PARTC, "compile", "examples/gpt.py", "--mesh", mesh, *micro, *options, "--precision", "fp64"]
            why = done([*made, "-o", build], deadline.left) or done([*PARTC, "verify", build], deadline.left)
        results.row(name, why or "equal to the single-device model")
        good = good and not why
    return good


def verify(results: Results, deadline: Deadline, only: tuple[str, ...]) -> bool:
    """Packages on one GPU against the single-device model."""
    results.table("Packages against the single-device model", "package", "result")
    good = True
    for kernels in ("triton", "aten"):
        for precision in ("fp64", "fp32", "bf16"):
            with tempfile.TemporaryDirectory() as folder:
                build = str(Path(folder) / "build")
                made = [*PARTC, "compile", "examples/gpt.py", "--mesh", "1", "--kernels", kernels]
                made += ["--precision", precision, "-o", build]
                why = done(made, deadline.left) or done([*PARTC, "verify", build], deadline.left, show=True)
                results.row(f"examples/gpt.py, {kernels}, {precision}", why or "equal")
                good = good and not why
    return good


def graphs(results: Results, deadline: Deadline, only: tuple[str, ...]) -> bool:
    """Steps that are repeated from CUDA graphs against steps that are done: what each leaves behind."""
    results.table(
        "CUDA graphs against the same package without", "model", "precision", "largest difference", "at", "result"
    )
    good = True
    cases = (("routed", "bf16", 0.02), ("noisy", "fp64", 1e-10), ("noisy", "fp16", 0.02))
    for model, precision, allowed in cases:
        with tempfile.TemporaryDirectory() as folder:
            build = Path(folder) / "build"
            made = [*PARTC, "compile", f"tests/models/{model}.py", "--mesh", "1", "--microbatches", "2"]
            made += ["--precision", precision, "--kernels", "triton", "-o", str(build)]
            train = [sys.executable, str(build / "train.py"), "--device", "cuda", "--steps", "12", "--no-tuning"]
            train += ["--clip", "0.1", "--accumulate", "3", "--warmup", "5", "--lr-schedule", "cosine"]
            runs = {"--no-cuda-graphs": Path(folder) / "done", "--cuda-graphs": Path(folder) / "repeated"}
            why = done(made, deadline.left)
            for how, record in runs.items():
                why = why or done([*train, how, "--record", str(record)], deadline.left)
            worst, where = (float("inf"), "") if why else apart(*runs.values())
            results.row(
                model, precision, f"{worst:.1e}", where, why or ("equal" if worst <= allowed else "too far apart")
            )
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


PARTS: Mapping[str, Part] = {
    "nccl": Part("NCCL's groups as the runtime uses them, and packages on several GPUs", 300, nccl),
    "verify": Part("packages on one GPU against the single-device model", 400, verify),
    "packages": Part("packages of many models and ranks in one process", 400, packages.table),
    "graphs": Part("CUDA graphs against steps without", 300, graphs),
    "runtime": Part("tests that need a device and no kernels", 200, marked),
    "kernels": Part("tests of elementwise kernels", 560, partial(tests, ("kernels", "activations", "places"))),
    "rows": Part(
        "tests of kernels over rows",
        560,
        partial(tests, ("rows", "cross_entropy", "dropout", "embedding")),
    ),
    "writes": Part("tests of AdamW, compression, tuning", 560, partial(tests, ("adamw", "compression", "tuning"))),
    "bandwidth": Part("kernels' bytes a second against a copy", 540, bandwidth.table),
    "gpt2": Part(
        "training GPT-2 124M against eager, torch.compile and Liger", 580, partial(training.table, "GPT-2 124M")
    ),
    "llama": Part("training Llama 1B against the same", 590, partial(training.table, "Llama 1B")),
    "qwen": Part("training a Qwen3 with 32 experts against the same", 580, partial(training.table, "Qwen3 MoE 1B")),
    "waits": Part("lines at which a step's host waits for the GPU", 300, training.waits),
    "profiles": Part("kernels, launches and host calls of a step, by torch's profiler", 300, training.profiles),
    "gpt2-autotune": Part("and against max-autotune", 580, partial(training.table, "GPT-2 124M", slow=True)),
    "llama-autotune": Part("and against max-autotune", 590, partial(training.table, "Llama 1B", slow=True)),
}


@click.command()
@click.option("--part", "parts", type=click.Choice(list(PARTS)), multiple=True, default=tuple(PARTS))
@click.option("--only", multiple=True, help="rows of the training tables that have this in their names")
@click.option("--out", type=click.Path(path_type=Path), help="a folder for results; $OUT by default")
@click.option("--list", "listed", is_flag=True, help="say what parts there are")
def main(parts: tuple[str, ...], only: tuple[str, ...], out: Path | None, listed: bool) -> None:
    """Everything, or some parts."""
    if listed:
        for name, part in PARTS.items():
            print(f"{name:<15} {part.seconds:>4} s  {part.what}")
        return
    if not torch.cuda.is_available():
        raise click.ClickException("there is no GPU here")
    import numpy
    import triton

    results = Results(folder_of(out))
    versions = f"torch {torch.__version__}, triton {triton.__version__}, NumPy {numpy.__version__}"
    results.say(f"# {torch.cuda.get_device_name()}, {versions}, Python {sys.version.split()[0]}")
    good = {name: PARTS[name].run(results, Deadline(PARTS[name].seconds), only) for name in parts}
    results.table("Parts", "part", "result")
    for name, well in good.items():
        results.row(name, "good" if well else "not good")
    sys.exit(0 if all(good.values()) else 1)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
