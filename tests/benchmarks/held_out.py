"""Predicted against published throughput of runs with which no constant was chosen: `python -m tests.benchmarks.held_out`.

    nanotron      the best configuration of each size and number of nodes (docs/benchmark_summary.svg of
                  huggingface/nanotron), and its scaling of tensor parallelism (scripts/scaling_benchmarks.py)
    torchtitan    benchmarks/llama3_h100_202412_torchtitan.md, on H100 with 96 GB at 500 W
    fms-fsdp      README of foundation-model-stack/fms-fsdp
    AutoModel     docs/performance-summary.md of NVIDIA-NeMo/Automodel
    Bridge        docs/performance-summary.md of NVIDIA-NeMo/Megatron-Bridge, 25.11; in fp8 with scales of tensors
    Bridge MoE    the same and its archive, 26.02 to 26.08; experts have equal loads, fp8 has scales of blocks or tensors
    Llama 3       The Llama 3 Herd of Models (Llama Team 2024), table 4, with causal attention in the model's flops.
                  The first stage has the embedding alone and the last one the head (section 3.3.2), so that stages have
                  one layer; torch's pipelines scatter FSDP's gradients once a step, which is ZeRO 1 here
    NeMo          docs/source/performance/performance_summary.md of NVIDIA/NeMo, 24.07, in fp8

Names in the first arguments choose tables and runs. Models are configurations for `hf:`. Recomputation is as published,
in recipes, too (gpt-oss in scripts/performance of Megatron-Bridge: norms and activations, but on GB300; AutoModel in
examples/benchmark: blocks), and "none" where it is not. nanotron's runs are predicted with torch's own kernels, and
with the network that was measured on its cluster: an all-reduce of 1 GB over 4 to 64 nodes ran at 177 to 219 GB/s of a
node's 400 in the best twentieth of its runs (Ultra-Scale Playbook, pp_comm_bandwidth; half of them had 160 to 33).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from partc.cluster.cluster import Cluster, preset
from partc.compilation.plan import ParallelPlan
from partc.compilation.simulation import Simulator
from partc.cost.calibration import calibration


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A published run: tokens a second and GPU, and gigabytes of a GPU where they are published."""

    table: str
    model: str
    device: str
    mesh: str
    microbatches: int
    batch: int
    seq: int
    tokens: float
    gigabytes: float = 0.0
    node: int = 8
    decisions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> ParallelPlan:
        options: dict[str, Any] = {"batch": self.batch, "seq": self.seq}
        given = {"mesh": self.mesh, "microbatches": self.microbatches, "options": options}
        return ParallelPlan.of({**given, **self.decisions})

    @property
    def seconds(self) -> float:
        return self.batch * self.seq / (self.tokens * self.plan.emitted.compile_options().mesh.size)

    @property
    def cluster(self) -> Cluster:
        size = self.plan.emitted.compile_options().mesh.size
        found = preset(f"{max(1, size // self.node)}x{min(size, self.node)}x{self.device}")
        if self.table == "nanotron":
            found = replace(found, between=replace(found.between, bandwidth=_MEASURED / calibration(found).between))
        if self.table == "torchtitan":
            found = replace(found, device=replace(found.device, memory=96 << 30, bandwidth=2.4e12))
        return found


def _llama(layers: int, hidden: int, heads: int, wide: int, vocabulary: int, **other: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers, "vocab_size": vocabulary}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 131072}
    named = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return {**named, **sizes, **heads_of, **other}


def _qwen(layers: int, hidden: int, heads: int, wide: int, experts: int) -> dict[str, Any]:
    found = _llama(layers, hidden, heads, 3 * hidden, 151936, num_key_value_heads=4, head_dim=128, norm_topk_prob=True)
    routed = {"moe_intermediate_size": wide, "num_experts": 128, "num_experts_per_tok": experts}
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


_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
}  # fmt: skip

MODELS: Mapping[str, Mapping[str, Any]] = {
    "nanotron 1B": _llama(16, 2048, 32, 8192, 131072, tie_word_embeddings=True),
    "nanotron 3B": _llama(28, 3072, 32, 8192, 131072, tie_word_embeddings=True),
    "nanotron 8B": _llama(32, 4096, 32, 14336, 131072),
    "nanotron 80B": _llama(80, 8192, 64, 28672, 131072),
    "llama2 7B": _llama(32, 4096, 32, 11008, 32000),
    "llama2 13B": _llama(40, 5120, 40, 13824, 32000),
    "llama2 70B": _llama(80, 8192, 64, 28672, 32000, num_key_value_heads=8),
    "llama3 8B": _llama(32, 4096, 32, 14336, 128256, num_key_value_heads=8),
    "llama3 70B": _llama(80, 8192, 64, 28672, 128256, num_key_value_heads=8),
    "llama3 405B": _llama(126, 16384, 128, 53248, 128256, num_key_value_heads=8),
    "qwen3 30B": _qwen(48, 2048, 32, 768, 8),
    "qwen3 235B": _qwen(94, 4096, 64, 1536, 8),
    "gpt-oss 120B": _llama(36, 2880, 64, 2880, 201088, **_OSS),
    "deepseek v3": _latent(128, 256, 129280, n_group=8, topk_group=4),
    "kimi k2": _latent(64, 384, 163840, n_group=1, topk_group=1, first_k_dense_replace=1),
}

# Model, dp, tp, pp, microbatches, sequences of one, ZeRO, model flops as a share of 989e12 in percent, gigabytes.
_BEST = """
    1B 128 2 2 1 2 1 5.25 8.40      3B 128 4 1 1 2 1 10.49 16.42    8B 128 4 1 1 2 0 18.69 57.76
    80B 32 16 1 4 2 1 17.79 53.46   1B 64 4 1 1 4 0 23.20 19.57     3B 64 4 1 1 4 0 26.77 38.98
    8B 32 8 1 1 8 0 32.71 63.39     80B 4 4 16 64 1 1 30.75 64.21   1B 64 2 1 1 4 0 29.46 38.84
    3B 32 4 1 1 8 0 34.59 66.20     8B 16 8 1 2 8 0 36.33 66.88     80B 1 4 32 256 1 0 34.29 61.18
    1B 32 1 2 8 1 1 32.47 16.27     3B 32 1 2 8 1 1 35.53 36.73     8B 32 1 2 8 1 1 39.50 59.09
    80B 1 4 16 256 1 0 30.65 63.07  1B 16 1 2 16 1 1 38.38 16.39    3B 16 1 2 8 2 1 40.39 53.33
    8B 16 1 2 16 1 1 43.31 61.10    80B 1 8 4 256 1 0 14.76 65.97   1B 8 1 2 32 1 1 41.59 19.45
    3B 8 1 2 16 2 1 43.77 54.31     8B 4 4 1 16 4 1 43.94 58.34     1B 4 1 2 16 4 1 44.32 41.76
    3B 4 1 2 32 2 1 46.68 56.87     8B 2 1 4 128 1 1 45.22 63.07
"""
_MEASURED = 194e9 / 8  # bytes a second and GPU between nodes of nanotron's cluster
_TENSOR = ((2, 3, 14167.25), (4, 9, 13460.16), (8, 18, 10888.53), (16, 40, 6159.30), (32, 90, 3609.73))


_EAGER: Mapping[str, Any] = {"kernels": "aten"}  # programs of torch's own operations, besides attention


def _nanotron() -> Iterator[HeldOut]:
    words = _BEST.split()
    for first in range(0, len(words), 9):
        size, *counts = words[first : first + 7]
        dp, tp, pp, times, each, zero = map(int, counts)
        share, gigabytes = map(float, words[first + 7 : first + 9])
        sizes = MODELS[f"nanotron {size}"]
        layers, hidden, wide = (sizes[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size"))
        each_token = layers * (4 * hidden * hidden + 3 * hidden * wide + 2 * 4096 * hidden) + hidden * 131072
        yield HeldOut(
            table="nanotron", model=f"nanotron {size}", device="H100-80GB", mesh=f"pp={pp},dp={dp},tp={tp}",
            microbatches=times, batch=dp * times * each, seq=4096, tokens=share / 100 * 989e12 / (6 * each_token),
            gigabytes=gigabytes, decisions={"zero": zero, **_EAGER},
        )  # fmt: skip
    for tp, each, tokens in _TENSOR:
        yield HeldOut(
            table="nanotron", model="nanotron 3B", device="H100-80GB", mesh=f"tp={tp}", microbatches=1, batch=each,
            seq=4096, tokens=tokens, decisions=_EAGER,
        )  # fmt: skip


def _one(
    table: str, model: str, device: str, mesh: str, figures: tuple[int, int, int, float], **decisions: Any
) -> HeldOut:
    """Figures: microbatches, batch, sequence, tokens a second and GPU."""
    microbatches, batch, seq, tokens = figures
    gigabytes, node = decisions.pop("gigabytes", 0.0), 4 if device.startswith("GB") else 8
    return HeldOut(
        table=table, model=model, device=device, mesh=mesh, microbatches=microbatches, batch=batch, seq=seq,
        tokens=tokens, gigabytes=gigabytes, node=node, decisions=decisions,
    )  # fmt: skip


_SHARDED: Mapping[str, Any] = {"zero": 3, "recompute": "selective"}
_SHARDED_AGAIN: Mapping[str, Any] = {"zero": 3, "recompute": "full"}
_NORMS: Mapping[str, Any] = {"zero": 1, "recompute": "selective"}
_EIGHT: Mapping[str, Any] = {"precision": "fp8", "zero": 1}
_PIECES: Mapping[str, Any] = {**_EIGHT, "tp_overlap": True}  # as recipes of Llama 3 with tp have it


_MIXED: Mapping[str, Any] = {"precision": "fp8", "zero": 1, "recompute": "selective"}


def _turns(stages: int) -> dict[str, Any]:
    return {"schedule": "interleaved", "virtual_stages": stages}


RUNS: tuple[HeldOut, ...] = (
    *_nanotron(),
    _one("torchtitan", "llama3 8B", "H100-80GB", "dp=8", (1, 16, 8192, 6667), **_SHARDED, gigabytes=77.0 * 1.074),
    _one("torchtitan", "llama3 8B", "H100-80GB", "dp=128", (1, 256, 8192, 6514), **_SHARDED, gigabytes=62.0 * 1.074),
    _one("fms-fsdp", "llama2 7B", "A100-80GB", "dp=128", (1, 256, 4096, 3760), zero=3),
    _one("fms-fsdp", "llama2 13B", "A100-80GB", "dp=128", (1, 128, 4096, 1700), zero=3),
    _one("fms-fsdp", "llama2 70B", "A100-80GB", "dp=128", (1, 768, 4096, 380), zero=3, recompute="full"),
    _one("AutoModel", "llama3 70B", "H100-80GB", "dp=32,tp=2", (4, 128, 8192, 866.77), **_SHARDED_AGAIN),
    _one("AutoModel", "qwen3 30B", "H100-80GB", "ep=8", (16, 512, 4096, 12040), **_SHARDED_AGAIN),
    _one("Bridge", "qwen3 235B", "GB200-186GB", "pp=8,ep=32", (256, 8192, 4096, 4916), zero=1, **_turns(3)),
    _one("Bridge MoE", "gpt-oss 120B", "GB300-288GB", "ep=64", (5, 1280, 4096, 19275), zero=1),
    _one("Bridge MoE", "gpt-oss 120B", "GB200-186GB", "ep=64", (5, 1280, 4096, 15938), **_NORMS),
    _one("Bridge MoE", "gpt-oss 120B", "B200-180GB", "dp=8,ep=8", (5, 1280, 4096, 13045), **_NORMS),
    _one("Bridge MoE", "gpt-oss 120B", "H100-80GB", "pp=4,dp=2,ep=8", (80, 1280, 4096, 5824), **_NORMS),
    _one("Bridge MoE", "qwen3 30B", "GB200-186GB", "ep=8", (16, 512, 4096, 39936), **_MIXED),
    _one("Bridge MoE", "qwen3 30B", "H100-80GB", "ep=16", (64, 1024, 4096, 8901), **_MIXED),
    _one("Bridge MoE", "qwen3 235B", "GB300-288GB", "pp=4,dp=2,ep=32", (64, 8192, 4096, 8816), **_MIXED, **_turns(12)),
    _one("Bridge MoE", "qwen3 235B", "GB200-186GB", "pp=8,ep=32", (256, 8192, 4096, 7280), **_MIXED, **_turns(3)),
    _one(
        "Bridge MoE",
        "qwen3 235B",
        "H100-80GB",
        "pp=8,dp=16,tp=2",
        (512, 8192, 4096, 1712),
        **_MIXED,
        **_turns(4),
        experts="ep=32@dp,tp",
    ),
    _one("Bridge MoE", "deepseek v3", "GB300-288GB", "pp=2,dp=4,ep=32", (32, 4096, 4096, 6288), **_MIXED, **_turns(8)),
    _one("Bridge MoE", "deepseek v3", "GB200-186GB", "pp=4,ep=64", (64, 4096, 4096, 4912), **_MIXED, **_turns(4)),
    _one("Bridge MoE", "deepseek v3", "B200-180GB", "pp=16,dp=2,ep=8", (256, 4096, 4096, 2815), **_MIXED),
    _one("Bridge MoE", "kimi k2", "GB300-288GB", "pp=4,ep=64", (32, 4096, 4096, 5332), **_MIXED, **_turns(4)),
    _one("Llama 3", "llama3 405B", "H100-80GB", "pp=16,dp=64,tp=8", (32, 2048, 8192, 170), zero=1, **_turns(8)),
    _one("Llama 3", "llama3 405B", "H100-80GB", "pp=16,dp=128,tp=8", (16, 2048, 8192, 158), zero=1, **_turns(8)),
    _one("Bridge fp8", "llama3 8B", "GB200-186GB", "dp=8", (8, 128, 8192, 31508), **_EIGHT),
    _one("Bridge fp8", "llama3 8B", "B200-180GB", "dp=8", (8, 128, 8192, 30624), **_EIGHT),
    _one("Bridge fp8", "llama3 8B", "H100-80GB", "dp=8", (16, 128, 8192, 14451), **_EIGHT | {"zero": 3}),
    _one("Bridge fp8", "llama3 70B", "H100-80GB", "pp=8,dp=2,tp=4", (64, 128, 8192, 1602), **_PIECES, **_turns(5)),
    _one("Bridge fp8", "llama3 405B", "B200-180GB", "pp=8,dp=2,cp=2,tp=4", (32, 64, 8192, 661), **_PIECES, **_turns(8)),
    _one("Bridge fp8", "llama3 405B", "H100-80GB", "pp=8,dp=8,cp=2,tp=8", (64, 512, 8192, 292), **_PIECES, **_turns(8)),
    _one("NeMo fp8", "llama2 7B", "H100-80GB", "dp=8", (16, 128, 4096, 16847), **_EIGHT),
    _one("NeMo fp8", "llama2 70B", "H100-80GB", "pp=4,dp=4,tp=4", (32, 128, 4096, 1707), **_PIECES, **_turns(20)),
    _one("NeMo fp8", "llama3 8B", "H100-80GB", "dp=4,cp=2", (32, 128, 8192, 12036), **_EIGHT),
)


def predictions(runs: Iterable[HeldOut]) -> Iterator[tuple[HeldOut, float, int, bool]]:
    """Yields runs with predicted seconds, bytes, and whether these fit."""
    with tempfile.TemporaryDirectory() as folder:
        known: dict[str, Simulator] = {}
        for run in runs:
            place = Path(folder, run.model.replace(" ", "-"))
            place.mkdir(exist_ok=True)
            (place / "config.json").write_text(json.dumps(MODELS[run.model]))
            cluster = run.cluster
            first = Simulator(f"hf:{place}/config.json", cluster, calibration(cluster))
            shared = known.setdefault(f"{run.model} {run.device}", first).on(cluster, first.rates.constants)
            found = shared.predict(run.plan)
            yield run, found.step_seconds, found.memory_bytes, found.fits


def main(wanted: tuple[str, ...]) -> None:
    errors: dict[str, list[float]] = {}
    chosen = [run for run in RUNS if not wanted or any(word in f"{run.table} {run.model}" for word in wanted)]
    print(f"{'run':<24} {'device':<11} {'mesh':<20} {'times':>5} {'published':>11} {'predicted':>11}  error  memory")
    for run, seconds, memory, fits in predictions(chosen):
        error = seconds / run.seconds - 1
        errors.setdefault(f"{run.table}, {run.device.partition('-')[0]}", []).append(error)
        published = f", published {run.gigabytes:.0f} GB" if run.gigabytes else ""
        figures = f"{run.microbatches:>5} {run.seconds:>9.3f} s {seconds:>9.3f} s {error:>+6.1%}"
        held = f"{memory / 1e9:.0f} GB{'' if fits else ', does not fit'}{published}"
        name = run.model if run.model.startswith(run.table) else f"{run.table} {run.model}"
        print(f"{name:<24} {run.device:<11} {run.mesh:<20} {figures}  {held}", flush=True)
    for table, found in errors.items():
        mean, bias = sum(map(abs, found)) / len(found), sum(found) / len(found)
        print(f"{table}: {len(found)} runs, mean error {mean:.1%}, bias {bias:+.1%}")


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
