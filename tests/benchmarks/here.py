"""Predicted against measured step times of packages on this machine: `python -m tests.benchmarks.here FOLDER`.

Compiles 46 packages for two and four processes, measures the processes (`partc cluster measure`), trains each package
for some steps, and compares: ten minutes, in which nothing else should run. The folder keeps packages, clusters and
metrics, so that a run that was stopped goes on, and `--only predict` compares again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import partc
from partc.cluster.files import cluster_of
from partc.compilation.plan import ParallelPlan
from partc.compilation.simulation import Simulator
from partc.cost.calibration import calibration
from tests.benchmarks.comparison import complete, prefer, rank_correlation, seconds, summary

WORKER = Path(__file__).parent / "workers" / "several.py"
GPT = str(Path(__file__).parent.parent / "models" / "gpt.py")
SIZES = {"layers": 4, "hidden": 256, "heads": 4, "seq": 128, "vocab": 2048}
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 2048, "max_position_embeddings": 256, "architectures": ["MixtralForCausalLM"],
}  # fmt: skip
STEPS, WARM = 9, 5  # steps become quicker up to the fifth one


def plans(folder: Path) -> Iterator[tuple[str, str, ParallelPlan]]:
    """The name, the model and the plan of each package."""
    config = folder / "mixtral.json"
    config.write_text(json.dumps(MIXTRAL))

    def gpt(mesh: str, batch: int = 16, **given: Any) -> tuple[str, str, ParallelPlan]:
        told = "_".join(f"{name}={value}" for name, value in given.items())
        options = {**SIZES, "batch": batch}
        plan = ParallelPlan(mesh=mesh, precision="fp32", kernels="aten", options=options, **given)
        return f"gpt_{mesh}_{batch}_{told}".replace(",", "+"), GPT, plan

    def moe(mesh: str, **given: Any) -> tuple[str, str, ParallelPlan]:
        told = "_".join(f"{name}={value}" for name, value in given.items())
        options = {"batch": 16, "seq": 128}
        plan = ParallelPlan(mesh=mesh, precision="fp32", kernels="aten", options=options, **given)
        return f"moe_{mesh}_{told}".replace(",", "+"), f"hf:{config}", plan

    yield gpt("dp=2")
    yield gpt("dp=2", 8)
    yield gpt("dp=2", 32)
    yield gpt("dp=2", microbatches=4)
    for zero in (1, 2, 3):
        yield gpt("dp=2", zero=zero)
    yield gpt("dp=2", zero=3, microbatches=4)
    yield gpt("dp=2", recompute="full")
    yield gpt("dp=2", recompute="selective", zero=1)
    yield gpt("tp=2")
    yield gpt("tp=2", microbatches=4)
    yield gpt("tp=2", recompute="full")
    yield gpt("cp=2")
    yield gpt("cp=2", zero=1, recompute="full")
    yield gpt("pp=2", microbatches=2)
    yield gpt("pp=2", microbatches=8)
    yield gpt("pp=2", microbatches=4, schedule="gpipe")
    yield gpt("pp=2", microbatches=4, schedule="interleaved", virtual_stages=2)
    yield gpt("pp=2", microbatches=4, schedule="zero-bubble")
    yield gpt("pp=2", microbatches=4, schedule="zbv")
    yield gpt("pp=2", microbatches=4, schedule="dualpipe-v")
    yield moe("ep=2")
    yield moe("dp=2")
    yield moe("tp=2")
    yield gpt("dp=4")
    yield gpt("dp=4", 32)
    yield gpt("dp=4", zero=1)
    yield gpt("dp=4", zero=3)
    yield gpt("dp=4", zero=2, microbatches=2)
    yield gpt("tp=4")
    yield gpt("tp=4", microbatches=2)
    yield gpt("dp=2,tp=2")
    yield gpt("dp=2,tp=2", zero=3)
    yield gpt("dp=2,tp=2", zero=1, recompute="full", microbatches=2)
    yield gpt("dp=2,cp=2")
    yield gpt("cp=2,tp=2")
    yield gpt("pp=2,dp=2", microbatches=4)
    yield gpt("pp=2,dp=2", microbatches=4, zero=1)
    yield gpt("pp=2,tp=2", microbatches=4)
    yield gpt("pp=2,tp=2", microbatches=4, schedule="interleaved", virtual_stages=2)
    yield gpt("pp=4", microbatches=4)
    yield gpt("pp=4", microbatches=8)
    yield gpt("pp=4", microbatches=8, schedule="gpipe")
    yield moe("dp=2,ep=2")
    yield moe("ep=4")


def compiled(folder: Path) -> None:
    for name, model, plan in plans(folder):
        if not (folder / name).exists():
            options = {item: getattr(plan, item) for item in ("schedule", "zero", "recompute", "microbatches")}
            given: dict[str, Any] = {**options, "virtual_stages": plan.virtual_stages, "precision": plan.precision}
            partc.compile(model, mesh=plan.mesh, options=plan.definitions, **given).write(folder / name)


def measured(folder: Path) -> None:
    for processes in (2, 4):
        file = folder / f"{processes}.toml"
        if not file.exists():
            options = ("-o", file, "--page", file.with_suffix(".html"), "--processes", processes)
            first("-m", "partc", "cluster", "measure", *options)
        names = [name for name, _, plan in plans(folder) if plan.compile_options().mesh.size == processes]
        logs = {name: folder / f"{name}.jsonl" for name in names}
        missing = {name: log for name, log in logs.items() if not complete(log, STEPS)}
        for log in missing.values():
            log.unlink(missing_ok=True)
        runs = [(str(folder / name), str(log), STEPS) for name, log in missing.items()]
        (folder / f"{processes}.json").write_text(json.dumps(runs))
        rendezvous = ("--nproc-per-node", processes, "--master-addr", "127.0.0.1", "--master-port", 29400)
        first("-m", "torch.distributed.run", *rendezvous, WORKER, folder / f"{processes}.json")


def first(*command: object) -> None:
    """Run a Python command before other work of this machine, as far as the user may say so."""
    process = subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.DEVNULL, start_new_session=True)
    prefer(process.pid)
    if process.wait():
        sys.exit(f"failed: {' '.join(map(str, command))}")


def predicted(folder: Path) -> None:
    simulators: dict[tuple[str, int], Simulator] = {}
    pairs = []
    for name, model, plan in plans(folder):
        log = folder / f"{name}.jsonl"
        if not complete(log, STEPS):
            continue
        processes = plan.compile_options().mesh.size
        if (model, processes) not in simulators:
            cluster = cluster_of(str(folder / f"{processes}.toml"))
            simulators[model, processes] = Simulator(model, cluster, calibration(cluster))
        found = simulators[model, processes].predict(plan)
        pair = seconds(log, WARM), found.step_seconds
        pairs.append(pair)
        parts = f"computes {found.compute:.3f}, exposed {found.exposed:.3f}, bubble {found.bubble:.3f}"
        print(f"{name:<60} {pair[0]:7.3f} s {pair[1]:7.3f} s {pair[1] / pair[0] - 1:+7.1%}  {parts}", flush=True)
    errors = [guess / real - 1 for real, guess in pairs]
    correlation = rank_correlation([real for real, _ in pairs], [guess for _, guess in pairs])
    print(f"{len(pairs)} packages: {summary(errors, correlation)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=("compile", "measure", "predict"))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("compile", compiled), ("measure", measured), ("predict", predicted)):
        if given.only in (None, name):
            part(given.folder)


if __name__ == "__main__":
    main()
