"""Predicted against measured step times on emulated clusters: `python -m tests.benchmarks.emulated FOLDER`.

The nodes are network namespaces of this machine, which links of limited rate join (tests/network.py): two nodes and
four, one rank on each or two, one switch or two with a narrow link between. On each network `partc cluster measure`
runs on all nodes, and agents of torchrun train the packages. Links are so slow that steps wait for them. It needs Linux
and root, and takes about 25 minutes; the folder keeps packages, clusters and metrics, so that a run that was stopped
goes on, and `--only predict` compares again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import partc
from partc.cluster.files import cluster_of
from partc.compilation.plan import ParallelPlan
from partc.compilation.simulation import Simulator
from partc.cost.calibration import calibration
from partc.planner.planning import Planner, Request
from tests.benchmarks.comparison import complete, prefer, rank_correlation, seconds, summary
from tests.network import Host, Unavailable, switched

WORKERS = Path(__file__).parent / "workers"
GPT = str(Path(__file__).parent.parent / "models" / "gpt.py")
SIZES = {"layers": 4, "hidden": 128, "heads": 4, "seq": 64, "vocab": 1024, "batch": 8}
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 1024, "max_position_embeddings": 256, "architectures": ["MixtralForCausalLM"],
}  # fmt: skip
STEPS, WARM = 7, 4
MASTER = 29400
LIMIT = 1500  # seconds of all packages of a network
SEARCH = 30.0  # seconds of the planner's search


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedNetwork:
    """Nodes with ranks, and the bits a second of their links and of the core, in 10^6."""

    name: str
    nodes: int
    ranks: int
    megabits: int
    leaf: int = 0
    core: int = 0

    @property
    def size(self) -> int:
        return self.nodes * self.ranks


NETWORKS = (
    EmulatedNetwork(name="two-30", nodes=2, ranks=1, megabits=30),
    EmulatedNetwork(name="four-40", nodes=4, ranks=1, megabits=40),
    EmulatedNetwork(name="pairs-40", nodes=2, ranks=2, megabits=40),
    EmulatedNetwork(name="core-40", nodes=4, ranks=1, megabits=40, leaf=2, core=40),
)


def plans(network: EmulatedNetwork, folder: Path) -> Iterator[tuple[str, str, ParallelPlan]]:
    """The name, the model and the plan of each package."""
    config = folder / "mixtral.json"
    config.write_text(json.dumps(MIXTRAL))

    def named(model: str, mesh: str, options: dict[str, Any], given: dict[str, Any]) -> tuple[str, ParallelPlan]:
        told = "_".join(f"{name}={value}" for name, value in given.items())
        plan = ParallelPlan(mesh=mesh, precision="fp32", kernels="aten", options=options, **given)
        return f"{model}_{mesh}_{told}".replace(",", "+"), plan

    def gpt(mesh: str, **given: Any) -> tuple[str, str, ParallelPlan]:
        name, plan = named("gpt", mesh, SIZES, given)
        return name, GPT, plan

    def moe(mesh: str, **given: Any) -> tuple[str, str, ParallelPlan]:
        name, plan = named("moe", mesh, {"batch": 8, "seq": 64}, given)
        return name, f"hf:{config}", plan

    if network.size == 2:
        yield gpt("dp=2")
        yield gpt("dp=2", microbatches=4)
        for zero in (1, 2, 3):
            yield gpt("dp=2", zero=zero)
        yield gpt("dp=2", zero=3, microbatches=2)
        yield gpt("dp=2", bucket="1MB")
        yield gpt("dp=2", compress_grads="bf16")
        yield gpt("dp=2", compress_grads="int8")
        yield gpt("tp=2")
        yield gpt("tp=2", microbatches=2)
        yield gpt("tp=2", recompute="full")
        yield gpt("cp=2")
        yield gpt("cp=2", zero=1)
        yield gpt("pp=2", microbatches=4)
        yield gpt("pp=2", microbatches=8)
        yield gpt("pp=2", microbatches=4, schedule="gpipe")
        yield gpt("pp=2", microbatches=4, schedule="interleaved", virtual_stages=2)
        yield gpt("pp=2", microbatches=4, schedule="zero-bubble")
        yield gpt("pp=2", microbatches=4, schedule="zbv")
        yield moe("dp=2")
        yield moe("ep=2")
        return
    yield gpt("dp=4")
    for zero in (1, 2, 3):
        yield gpt("dp=4", zero=zero)
    yield gpt("dp=4", compress_grads="bf16")
    yield gpt("dp=4", compress_grads="int8")
    yield gpt("tp=4")
    yield gpt("dp=2,tp=2")
    yield gpt("tp=2,dp=2")
    yield gpt("dp=2,tp=2", zero=3)
    yield gpt("dp=2,cp=2")
    yield gpt("pp=4", microbatches=4)
    yield gpt("pp=4", microbatches=8)
    yield gpt("pp=2,dp=2", microbatches=4)
    yield gpt("dp=2,pp=2", microbatches=4)
    yield gpt("pp=2,tp=2", microbatches=4)
    yield moe("ep=4")
    yield moe("dp=2,ep=2")
    if network.ranks > 1:
        yield gpt("dp=4", nodes=network.nodes)
        yield gpt("dp=4", nodes=network.nodes, zero=1)
        yield gpt("dp=4", nodes=network.nodes, zero=3)
        yield gpt("dp=4", nodes=network.nodes, compress_grads="int8")


DECISIONS = (
    "schedule", "zero", "recompute", "microbatches", "virtual_stages", "precision", "nodes", "compress_grads", "bucket",
    "loss_chunks",
)  # fmt: skip


def packages(folder: Path) -> Path:
    return folder / "packages"


def compiled(networks: Sequence[EmulatedNetwork], folder: Path) -> None:
    """Equal packages serve several networks."""
    for network in networks:
        for name, model, plan in plans(network, folder):
            if not (packages(folder) / name).exists():
                built(name, model, plan, folder)


def built(name: str, model: str, plan: ParallelPlan, folder: Path) -> None:
    given: dict[str, Any] = {name: getattr(plan, name) for name in DECISIONS}
    partc.compile(model, mesh=plan.mesh, options=plan.definitions, **given).write(packages(folder) / name)


def log_of(network: EmulatedNetwork, name: str, folder: Path) -> Path:
    return folder / network.name / f"{name}.jsonl"


def measured(network: EmulatedNetwork, names: Sequence[str], folder: Path) -> None:
    """Measure the network, and train packages on it. Raises Unavailable."""
    here = folder / network.name
    here.mkdir(exist_ok=True)
    missing = [name for name in names if not complete(log_of(network, name, folder), STEPS)]
    if not missing and (here / "0.toml").exists():
        return
    for name in missing:
        log_of(network, name, folder).unlink(missing_ok=True)
    million = 1_000_000
    with switched(network.nodes, network.megabits * million, leaf=network.leaf, core=network.core * million) as hosts:
        if not (here / "0.toml").exists():
            master = ("--master", f"{hosts[0].address}:{MASTER}")
            sizes = ("--processes", network.ranks, "--nodes", network.nodes)
            probes = [
                (
                    "-m",
                    "partc",
                    "cluster",
                    "measure",
                    *master,
                    *sizes,
                    "--node-rank",
                    place,
                    "-o",
                    here / f"{place}.toml",
                )
                for place in range(network.nodes)
            ]
            everywhere(hosts, probes, here, "measure")
        runs = [(str(packages(folder) / name), str(log_of(network, name, folder)), STEPS) for name in missing]
        (here / "runs.json").write_text(json.dumps(runs))
        agents = [
            (
                "-m", "torch.distributed.run", "--nnodes", network.nodes, "--node-rank", place,
                "--nproc-per-node", network.ranks, "--master-addr", hosts[0].address, "--master-port", MASTER,
                WORKERS / "several.py", here / "runs.json",
            )
            for place in range(network.nodes)
        ]  # fmt: skip
        if runs:
            everywhere(hosts, agents, here, "runs")


def everywhere(hosts: Sequence[Host], commands: Sequence[Sequence[object]], here: Path, name: str) -> None:
    """Run a Python command on each host; what they say goes to files."""
    started = []
    for place, (host, command) in enumerate(zip(hosts, commands, strict=True)):
        words = [*host.prefix, sys.executable, *map(str, command)]
        environment: Mapping[str, str] = {**os.environ, **host.environment, "OMP_NUM_THREADS": "1"}
        with (here / f"{name}-{place}.log").open("w") as log:
            process = subprocess.Popen(
                words, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        prefer(process.pid)
        started.append(process)
    try:
        codes = [process.wait(timeout=LIMIT) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(codes):
        sys.exit(f"{name} failed on {here.name}: see {here}/{name}-*.log")


def chosen(network: EmulatedNetwork, folder: Path) -> str:
    """The name of the package of the planner's choice for the GPT; it is one more package of the network."""
    name = f"choice_{network.name}"
    file = folder / network.name / "choice.json"
    if not file.exists():
        cluster = cluster_of(str(folder / network.name / "0.toml"))
        request = Request.checked(
            GPT, cluster, options=SIZES, precision="fp32", kernels="aten", max_seconds=SEARCH, fix=""
        )
        file.write_text(Planner(request).choice().best.plan.text)
    if not (packages(folder) / name).exists():
        built(name, GPT, ParallelPlan.of(json.loads(file.read_text())), folder)
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The measured and the predicted step of a package, and the share of the prediction that waits for links."""

    name: str
    measured: float
    predicted: float
    waits: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def compared(network: EmulatedNetwork, folder: Path) -> Iterator[Compared]:
    cluster = cluster_of(str(folder / network.name / "0.toml"))
    simulators: dict[str, Simulator] = {}
    for name, model, plan in plans(network, folder):
        log = log_of(network, name, folder)
        if not complete(log, STEPS):
            print(f"{network.name} {name}: not measured")
            continue
        if model not in simulators:
            simulators[model] = Simulator(model, cluster, calibration(cluster))
        found = simulators[model].predict(plan)
        waits = 1 - found.compute / found.step_seconds
        print(
            f"{network.name:<10} {name:<52} {seconds(log, WARM):7.3f} {found.step_seconds:7.3f} "
            f"{found.step_seconds / seconds(log, WARM) - 1:+7.1%}  computes {found.compute:.3f}, exposed {found.exposed:.3f}, "
            f"bubble {found.bubble:.3f}",
            flush=True,
        )
        yield Compared(name=name, measured=seconds(log, WARM), predicted=found.step_seconds, waits=waits)


def told(name: str, found: Sequence[Compared]) -> str:
    correlation = rank_correlation([each.measured for each in found], [each.predicted for each in found])
    return f"{name}: {len(found)} packages, {summary([each.error for each in found], correlation)}"


def choice(network: EmulatedNetwork, found: Sequence[Compared], folder: Path) -> str:
    """The measured step of the planner's choice, and of the best measured package of the same model."""
    log = log_of(network, f"choice_{network.name}", folder)
    if not complete(log, STEPS):
        return f"{network.name}: the planner's choice is not measured"
    plan = json.loads((folder / network.name / "choice.json").read_text())
    best = min((each for each in found if each.name.startswith("gpt")), key=lambda each: each.measured)
    took = seconds(log, WARM)
    return (
        f"{network.name}: the planner chooses {plan}, which takes {took:.3f} s; "
        f"the best package, {best.name}, {best.measured:.3f} s: {took / best.measured - 1:+.1%}"
    )


def stopped(*_: object) -> None:
    """Leave, so that namespaces end with their context, which a second signal would disturb."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=("compile", "measure", "predict"))
    parser.add_argument("--networks", nargs="*", help=f"of {', '.join(network.name for network in NETWORKS)}")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, stopped)
    networks = [network for network in NETWORKS if not given.networks or network.name in given.networks]
    if given.only in (None, "compile"):
        compiled(networks, folder)
    if given.only in (None, "measure"):
        for network in networks:
            try:
                measured(network, [name for name, _, _ in plans(network, folder)], folder)
                measured(network, [chosen(network, folder)], folder)
            except Unavailable as error:
                print(f"no network namespaces here: {error}", file=sys.stderr)
                sys.exit(os.EX_UNAVAILABLE)
    if given.only in (None, "predict"):
        everything = []
        for network in networks:
            found = list(compared(network, folder))
            everything += found
            print(told(network.name, found))
            print(choice(network, found, folder))
        print(told("all", everything))
        print(told("waits of at least half", [each for each in everything if each.waits >= 0.5]))


if __name__ == "__main__":
    main()
