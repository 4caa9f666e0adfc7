"""Predicted against published runs: `python -m tests.benchmarks.published [TABLE ...] [--every N] [--described]`.

The runs are in runs/*.csv: one line for each, with its model, device, mesh, microbatches, sequences of a microbatch
(`each`), tokens a second and GPU, and gigabytes of a GPU where these are published. Lines without tokens failed, most of
them for want of memory. `words` are what is known of a program beyond its plan; `--described` predicts with them, and
with the table's network and devices. Without it, predictions are those of plain plan lines on preset clusters.
Constants of the cost model were chosen with the runs that are marked as `seen`, and all of Megatron-LM's; the report has
the others by themselves.

    playbook    3,287 runs of nanotron on 1 to 64 nodes (huggingface/ultrascale-playbook, benchmarks_interactive.html).
                An all-reduce of 256 MB over 4 to 64 nodes of its cluster ran at 219 to 177 GB/s of a node's 400 in the best
                twentieth of its measurements, and at 160 to 33 in half of them (pp_comm_bandwidth.html)
    foundry     scripts/train/benchmarking/README.md of mosaicml/llm-foundry, whose attention is Triton's kernel of the
                first FlashAttention (submit_benchmarks.py)
    megatron    Narayanan et al., SC 2021, table 1; the table of weak scaling in the README of NVIDIA/Megatron-LM
    bridge      docs/performance-summary.md and its archive of NVIDIA-NeMo/Megatron-Bridge, 25.09 to 26.08. Recipes
                (scripts/performance/configs) hold gradients in bf16, and send tokens by DeepEP and HybridEP; those of
                Kimi K2 have Muon
    nemo        docs/source/performance of NVIDIA/NeMo: 24.07, and long sequences, whose flops count whole attention
    dgxc        READMEs of NVIDIA/dgxc-benchmarking, 2024 and 2025
    torchtitan  benchmarks/*.md of pytorch/torchtitan; its H100 have 96 GB with 2.4 TB/s, and 500 of 700 W. In pipelines it
                gathers parameters and scatters gradients once a step, which is ZeRO 1 here
    automodel   docs/performance-summary.mdx of NVIDIA-NeMo/Automodel; its pipelines are like torchtitan's, its weights and
                states in bf16, and DeepEP sends its tokens
    others      README of foundation-model-stack/fms-fsdp; The Llama 3 Herd of Models (Llama Team 2024), table 4
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from partc.cluster.cluster import Cluster, preset
from partc.compilation.plan import ParallelPlan
from partc.compilation.simulation import Prediction, Simulator
from partc.cost.calibration import calibration
from partc.errors import PartcError
from tests.benchmarks.comparison import rank_correlation, summary

RUNS = Path(__file__).parent / "runs"
GPT = Path(__file__).parent.parent / "models" / "gpt.py"
TABLES = ("megatron", "foundry", "others", "nemo", "dgxc", "bridge", "automodel", "torchtitan", "playbook")


def _llama(layers: int, hidden: int, heads: int, wide: int, vocabulary: int, **other: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers, "vocab_size": vocabulary}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 131072}
    named = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return {**named, **sizes, **heads_of, **other}


def _mixtral(layers: int, hidden: int, heads: int, wide: int, vocabulary: int) -> dict[str, Any]:
    routed = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "head_dim": 128}
    named = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 8}
    return _llama(layers, hidden, heads, wide, vocabulary, **named, **routed)


def _nemotron(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    named = {"model_type": "nemotron", "architectures": ["NemotronForCausalLM"], "num_key_value_heads": 8}
    return _llama(layers, hidden, heads, 4 * hidden, 256000, **named, hidden_act="relu2", partial_rotary_factor=0.5)


def _qwen(layers: int, hidden: int, heads: int, wide: int) -> dict[str, Any]:
    found = _llama(layers, hidden, heads, 3 * hidden, 151936, num_key_value_heads=4, head_dim=128, norm_topk_prob=True)
    routed = {"moe_intermediate_size": wide, "num_experts": 128, "num_experts_per_tok": 8}
    return {**found, **routed, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}


def _latent(heads: int, experts: int, vocabulary: int, **other: Any) -> dict[str, Any]:
    """DeepSeek-V3 and models of its form: 61 layers of width 7168, all but the first with experts."""
    found = _llama(61, 7168, heads, 18432, vocabulary, num_key_value_heads=heads, moe_intermediate_size=2048)
    routed = {"n_routed_experts": experts, "num_experts_per_tok": 8, "n_shared_experts": 1, **other}
    ranks = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    return {**found, **routed, **ranks, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}


def _oss(layers: int, experts: int) -> dict[str, Any]:
    named = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_key_value_heads": 8, "head_dim": 64}
    routed = {"num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128}
    return _llama(layers, 2880, 64, 2880, 201088, **named, **routed)


MODELS: Mapping[str, Mapping[str, Any]] = {
    "1B": _llama(16, 2048, 32, 8192, 131072, tie_word_embeddings=True),  # these four are nanotron's
    "3B": _llama(28, 3072, 32, 8192, 131072, tie_word_embeddings=True),
    "8B": _llama(32, 4096, 32, 14336, 131072),
    "80B": _llama(80, 8192, 64, 28672, 131072),
    "llama2 7B": _llama(32, 4096, 32, 11008, 32000),
    "llama2 13B": _llama(40, 5120, 40, 13824, 32000),
    "llama2 70B": _llama(80, 8192, 64, 28672, 32000, num_key_value_heads=8),
    "llama3 8B": _llama(32, 4096, 32, 14336, 128256, num_key_value_heads=8),
    "llama3 70B": _llama(80, 8192, 64, 28672, 128256, num_key_value_heads=8),
    "llama3 405B": _llama(126, 16384, 128, 53248, 128256, num_key_value_heads=8),
    **{f"llama3 405B {n}": _llama(n, 16384, 128, 53248, 128256, num_key_value_heads=8) for n in (7, 21, 42)},
    "nemotron4 15B": _nemotron(32, 6144, 48),
    "nemotron4 340B": _nemotron(96, 18432, 96),
    **{f"grok {layers}": _mixtral(layers, 6144, 48, 32768, 131072) for layers in (2, 4, 8, 16, 32, 64)},
    "qwen3 30B": _qwen(48, 2048, 32, 768),
    "qwen3 235B": _qwen(94, 4096, 64, 1536),
    "gpt-oss 20B": _oss(24, 32),
    "gpt-oss 120B": _oss(36, 128),
    "deepseek v3": _latent(128, 256, 129280, n_group=8, topk_group=4),
    "kimi k2": _latent(64, 384, 163840, n_group=1, topk_group=1, first_k_dense_replace=1),
}


def _nanotrons(cluster: Cluster) -> Cluster:
    """The network at its best rates, and the time in which nanotron issues as much as one operation of a package."""
    device = replace(cluster.device, host=6e-5)
    rate = 185e9 / 8 / calibration(cluster).between
    return replace(cluster, device=device, between=replace(cluster.between, bandwidth=rate))


def _grand_teton(cluster: Cluster) -> Cluster:
    """H100 with other memory. Power grows with the cube of the clock, as the voltage grows with it."""
    device = cluster.device
    if not device.name.startswith("H100"):
        return cluster
    clock = (500 / 700) ** (1 / 3)
    peak = {name: clock * rate for name, rate in device.peak.items()}
    quick = replace(device, peak=peak, fp8=clock * device.fp8, special=clock * device.special)
    return replace(cluster, device=replace(quick, memory=96 << 30, bandwidth=2.4e12))


# What is known of all programs and clusters of a table.
_WORDS: Mapping[str, Mapping[str, Any]] = {
    "playbook": {"kernels": "aten", "attention": "flash-2", "dp_overlap": False},
    "foundry": {"kernels": "aten", "attention": "triton"},
    "torchtitan": {"attention": "flash-2"},
    "others": {"attention": "flash-2"},
    "bridge": {"gradients": "bf16", "ep_by_node": True},
    "automodel": {"gradients": "bf16", "weights": "bf16", "ep_by_node": True},
}
_CLUSTERS: Mapping[str, Callable[[Cluster], Cluster]] = {"playbook": _nanotrons, "torchtitan": _grand_teton}
_AXES = ("pp", "dp", "ep", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run: tokens a second and GPU, or 0 if it failed; gigabytes of a GPU, or 0 if they are not published."""

    table: str
    model: str
    device: str
    plan: ParallelPlan
    words: Mapping[str, Any]
    tokens: float
    gigabytes: float
    seen: bool

    @property
    def ranks(self) -> int:
        return self.plan.emitted.compile_options().mesh.size

    @property
    def batch(self) -> int:
        """Tokens of a step."""
        return int(self.plan.options["batch"]) * int(self.plan.options["seq"])

    @property
    def seconds(self) -> float:
        return self.batch / (self.tokens * self.ranks)

    @property
    def cluster(self) -> Cluster:
        node = 4 if self.device.startswith("GB") else 8
        return preset(f"{max(1, self.ranks // node)}x{min(self.ranks, node)}x{self.device}")

    @property
    def described(self) -> ParallelPlan:
        """The plan with what else is known of the program."""
        return replace(self.plan, **_WORDS.get(self.table, {}), **self.words)


def runs(table: str) -> Iterator[Run]:
    """The runs of a table; columns that it lacks have one value throughout."""
    with (RUNS / f"{table}.csv").open() as file:
        for line in csv.DictReader(file):
            yield _run(table, line)


def _run(table: str, line: Mapping[str, str]) -> Run:
    sizes = {axis: int(line.get(axis, 1)) for axis in _AXES}
    count, stages = int(line.get("microbatches", 1)), int(line.get("stages", 1))
    options: dict[str, Any] = {"batch": sizes["dp"] * sizes["ep"] * count * int(line["each"])}
    options["seq"] = int(line.get("seq", 4096))
    if line["model"].startswith("gpt "):
        figures = line["model"].split()[1:]
        options |= dict(zip(("layers", "hidden", "heads", "vocab"), map(int, figures[:4]), strict=True))
        options["written"] = "written" in figures  # attention is spelled out
    zero = line.get("zero", "1")
    given: dict[str, Any] = {
        "mesh": ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "dp=1",
        "microbatches": count,
        "zero": int(zero) if zero.isdecimal() else zero,
        "recompute": line.get("recompute", "none"),
        "precision": line.get("precision", "fp8" if table == "nemo" else "bf16"),
        "options": options,
    }
    if stages > 1:
        given |= {"schedule": "interleaved", "virtual_stages": stages}
    if experts := line.get("experts", ""):
        given["experts"] = experts.replace(" ", ",")
    words: dict[str, Any] = {
        name: value or True for name, _, value in (word.partition("=") for word in line.get("words", "").split())
    }
    if "offload" in words:
        words["offload"] = float(words["offload"])
    return Run(
        table=table, model=line["model"], device=line.get("device", "H100"), plan=ParallelPlan.of(given),
        words=words, tokens=float(line["tokens"] or 0),
        gigabytes=float(line.get("gigabytes") or 0), seen=line.get("seen", "1") == "1",
    )  # fmt: skip


def predictions(found: Iterable[Run], *, described: bool) -> Iterator[tuple[Run, Prediction | PartcError]]:
    """Yields runs, in an order in which neighbours share programs, with their predictions."""
    with tempfile.TemporaryDirectory() as folder:

        def shared(run: Run) -> tuple[Any, ...]:
            return run.model, run.plan.options["seq"]

        for (model, _), group in groupby(sorted(found, key=shared), key=shared):
            source = str(GPT)
            if not model.startswith("gpt "):
                place = Path(folder, model.replace(" ", "-"))
                place.mkdir(exist_ok=True)
                (place / "config.json").write_text(json.dumps(MODELS[model]))
                source = f"hf:{place}/config.json"
            first: Simulator | None = None
            known: dict[tuple[str, str], Prediction] = {}
            for run in group:
                cluster = _CLUSTERS.get(run.table, lambda same: same)(run.cluster) if described else run.cluster
                constants = calibration(cluster)
                first = first or Simulator(source, cluster, constants)
                plan = run.described if described else run.plan
                key = plan.text, cluster.name
                try:
                    if key not in known:
                        known[key] = first.on(cluster, constants).predict(plan)
                    yield run, known[key]
                except PartcError as error:
                    yield run, error


def choices(pairs: Iterable[tuple[Run, Prediction]]) -> list[list[tuple[Run, Prediction]]]:
    """The runs of each model, device, number of ranks, batch and precision for which several plans are published."""
    groups: dict[tuple[Any, ...], list[tuple[Run, Prediction]]] = {}
    for run, prediction in pairs:
        key = run.model, run.device, run.ranks, run.batch, run.plan.options["seq"], run.plan.precision
        groups.setdefault(key, []).append((run, prediction))
    several = (members for members in groups.values() if len({run.plan.text for run, _ in members}) > 2)
    return [members for members in several if any(run.tokens for run, _ in members)]


def kept(members: list[tuple[Run, Prediction]]) -> float:
    """The measured throughput of the run that is predicted to be the quickest of those that fit, as a share of the
    best; 0 if it failed.
    """
    fitting = [pair for pair in members if pair[1].fits] or members[:1]
    chosen, _ = min(fitting, key=lambda pair: pair[1].step_seconds)
    best = max(run.tokens for run, _ in members)
    return max(run.tokens for run, _ in members if run.plan == chosen.plan) / best


def ranked(members: list[tuple[Run, Prediction]]) -> float:
    """The rank correlation of throughput among plans of one model on one cluster; NaN if fewer than five ran."""
    ran = [(run, found) for run, found in members if run.tokens]
    if len({run.plan.text for run, _ in ran}) < 5:
        return float("nan")
    return rank_correlation([run.tokens for run, _ in ran], [1 / found.step_seconds for _, found in ran])


def report(name: str, pairs: list[tuple[Run, Prediction]]) -> None:
    """Print errors of the step time and of memory, ranks of throughput, what fits, and what choices keep."""
    ran = [(run, found) for run, found in pairs if run.tokens]
    if not ran:
        return
    errors = [found.step_seconds / run.seconds - 1 for run, found in ran]
    rates = [run.batch / (found.step_seconds * run.ranks) for run, found in ran]
    ranks = rank_correlation([run.tokens for run, _ in ran], rates) if len(ran) > 2 else float("nan")
    print(f"{name}: {len(ran)} runs, {summary(errors, ranks)}", end="")
    if memory := [found.memory_bytes / 1e9 / run.gigabytes - 1 for run, found in ran if run.gigabytes]:
        print(f"; memory {sum(map(abs, memory)) / len(memory):.1%}, bias {sum(memory) / len(memory):+.1%}", end="")
    counts = Counter((run.tokens > 0, found.fits) for run, found in pairs)
    for ended, ran_so in (("ran", True), ("failed", False)):
        print(f"; {ended} {counts[ran_so, True]} that fit, {counts[ran_so, False]} that do not", end="")
    if groups := choices(pairs):
        print(f"; choices keep {fmean(map(kept, groups)):.1%} of the best, {len(groups)} groups", end="")
        if ranks_inside := [rank for rank in map(ranked, groups) if not math.isnan(rank)]:
            print(f", rank correlation inside {len(ranks_inside)} of them {fmean(ranks_inside):.2f}", end="")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)}; default: all")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="simulate every Nth run of a table")
    parser.add_argument("--described", action="store_true", help="predict with what is known of programs and clusters")
    given = parser.parse_args()
    if unknown := set(given.tables) - set(TABLES):
        parser.error(f"no table {', '.join(sorted(unknown))}: choose from {', '.join(TABLES)}")
    for table in given.tables or TABLES:
        pairs: list[tuple[Run, Prediction]] = []
        for run, found in predictions(list(runs(table))[:: given.every], described=given.described):
            plan, ran = run.plan, run.tokens > 0
            place = f"{run.model:<24} {run.device:<9} {run.ranks:>5} {plan.mesh:<24} {plan.microbatches:>4} {plan.precision:<4}"
            if isinstance(found, PartcError):
                print(f"{place} {found.code} {found.cause}", flush=True)
                continue
            pairs.append((run, found))
            measured = f"{run.seconds:>9.3f} s" if ran else "     failed"
            error = f"{found.step_seconds / run.seconds - 1:>+7.1%}" if ran else " " * 7
            memory = f"{found.memory_bytes / 1e9:.0f} GB" + (f" of {run.gigabytes:.0f}" if run.gigabytes else "")
            memory += "" if found.fits else ", does not fit"
            print(f"{place} {measured} {found.step_seconds:>9.3f} s {error}  {memory}", flush=True)
        for device in dict.fromkeys(run.device for run, _ in pairs):
            report(f"{table}, {device}", [(run, found) for run, found in pairs if run.device == device])
        report(table, pairs)
        report(f"{table}, not seen", [(run, found) for run, found in pairs if not run.seen])


if __name__ == "__main__":
    main()
