"""Tokens a second and memory of training steps: the package on mesh 1 against one device's own ways."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.commands import PARTC, done
from tests.gpu.results import Deadline, Results

PEER, PROFILE, WAITS = (Path(__file__).with_name(name) for name in ("peer.py", "step_profile.py", "waits.py"))
WARM, STEPS = 10, 30
MOST_SECONDS = 180  # of a row; torch's autotuning takes what its part has
LABELS: Mapping[str, tuple[str, tuple[str, ...]]] = {  # kernels, and options of train.py
    "partc, triton": ("triton", ()),
    "partc, triton, CUDA graphs": ("triton", ("--cuda-graphs",)),
    "partc, aten": ("aten", ()),
}
PEERS = ("compile", "eager", "liger")
SLOW = "max-autotune"
OPERATIONS = ("regions/", "stages/", "kernels/", "runtime/ops/")  # where a wait would stand between operations
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12,
    "n_head": 12, "n_positions": 1024, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 50304, "hidden_size": 1024,
    "intermediate_size": 3072, "moe_intermediate_size": 768, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {"GPT-2 124M": (GPT2, 16, 1024), "Llama 1B": (LLAMA, 4, 2048), "Qwen3 MoE 1B": (QWEN, 8, 1024)}


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens a second of the median step, and the most bytes held."""

    speed: float
    peak: int


def table(model: str, results: Results, deadline: Deadline, only: tuple[str, ...], *, slow: bool = False) -> bool:
    """Whether the package is as fast as the best of its peers, in no more memory; `slow` is against one peer alone.

    What is compared comes first, as time may end. Peers that are not installed are skipped by name.
    """
    config, batch, seq = MODELS[model]
    rows = ("partc, triton", SLOW) if slow else ("partc, triton", "compile", *LABELS, *PEERS)
    rows = tuple(
        dict.fromkeys(label for label in rows if not only or any(text in f"{model}, {label}" for text in only))
    )
    title = f"Training {model} in bf16, AdamW, {batch} x {seq} tokens, one GPU"
    results.table(title, "", "tokens/s", "to the best peer before it", "GiB", "result")
    found: dict[str, Measured] = {}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        for label in rows:
            if label == "liger" and importlib.util.find_spec("liger_kernel") is None:
                results.row(label, "", "", "", "skipped: liger_kernel is not installed")
                continue
            seconds = deadline.left if label == SLOW else min(MOST_SECONDS, deadline.left)
            measure = _package if label in LABELS else _peer
            measured = measure(label, path, batch, seq, seconds)
            if isinstance(measured, str):
                failed = True
                results.row(label, "", "", "", measured)
                continue
            best = max((other.speed for name, other in found.items() if name not in LABELS), default=0.0)
            ratio = f"{measured.speed / best:.2f}" if best else ""
            results.row(label, f"{measured.speed:,.0f}", ratio, f"{measured.peak / 2**30:.2f}", "measured")
            found[label] = measured
    peers = [measured for label, measured in found.items() if label not in LABELS]
    ours = [measured for label, measured in found.items() if "triton" in label]
    if not peers or not ours:
        return not failed
    best, least = max(peer.speed for peer in peers), min(peer.peak for peer in peers)
    fast, small = any(each.speed >= best for each in ours), all(each.peak <= least for each in ours)
    results.say(
        f"\nthe best of {len(ours)} packages: {max(each.speed for each in ours) / best:.2f} of the best peer's speed"
    )
    return fast and small and not failed


def profiles(results: Results, deadline: Deadline, only: tuple[str, ...]) -> bool:
    """Where the time of packages' steps goes: kernels, launches and the host's calls."""
    results.table("A step under torch's profiler", "model", "", "ms a step", "number a step")
    good = True
    for model, found in _observed(PROFILE, 6, deadline, only):
        if isinstance(found, str):
            good = False
            results.row(model, found, "", "")
            continue
        results.row(model, "the step", f"{found['step_ms']:.1f}", 1)
        results.row(model, "all kernels and copies", f"{found['kernels_ms']:.1f}", f"{found['launches']:.0f}")
        for name, (spent, number) in (*found["kernels"].items(), *found["host"].items()):
            results.row(model, name.replace("|", "/")[:90], f"{spent:.2f}", f"{number:.1f}")
    return good


def waits(results: Results, deadline: Deadline, only: tuple[str, ...]) -> bool:
    """Whether the host waits for the GPU only at the beginning and at the end of a step, and in none of its operations."""
    results.table("Waits of the host for the GPU", "model", "line", "in six steps")
    good = True
    for model, found in _observed(WAITS, 6, deadline, only):
        if isinstance(found, str):
            good = False
            results.row(model, found, "")
            continue
        for line, number in found.items():
            results.row(model, line, number)
        good = good and not any(line.startswith(OPERATIONS) for line in found)
    return good


def _observed(
    script: Path, steps: int, deadline: Deadline, only: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yield each model, and the findings of a script that runs its package, or the reason for their absence."""
    for model, (config, batch, seq) in MODELS.items():
        if only and not any(text in model for text in only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            path, build, out = (Path(folder) / name for name in ("config.json", "build", "found.json"))
            path.write_text(json.dumps(config))
            why = done(_compiled(path, batch, seq, "triton", build), deadline.left)
            words = [str(script), str(build / "train.py"), str(steps), str(out)]
            why = why or done([sys.executable, *words], deadline.left)
            yield model, why or json.loads(out.read_text())


def _compiled(config: Path, batch: int, seq: int, kernels: str, build: Path) -> list[str]:
    sizes = ["--batch", str(batch), "--seq", str(seq), "--kernels", kernels, "-o", str(build)]
    return [*PARTC, "compile", f"hf:{config}", "--mesh", "1", "--precision", "bf16", *sizes]


def _package(label: str, config: Path, batch: int, seq: int, seconds: float) -> Measured | str:
    """The measurement, or the reason for its absence. Packages with the same kernels share one tuning."""
    kernels, options = LABELS[label]
    limit = Deadline(seconds)
    build, reports = config.parent / f"build {kernels}", config.parent / f"reports {label}"
    if not build.exists():
        why = done(_compiled(config, batch, seq, kernels, build), limit.left)
        if why:
            return f"compile: {why}"
    run = [sys.executable, str(build / "train.py"), "--device", "cuda", "--steps", str(WARM + STEPS)]
    why = done([*run, "--report", str(reports), *options], limit.left)
    if why:
        return why
    report = json.loads((reports / "rank_000.json").read_text())
    return Measured(batch * seq / statistics.median(report["step_seconds"][WARM:]), report["peak_bytes"])


def _peer(peer: str, config: Path, batch: int, seq: int, seconds: float) -> Measured | str:
    out = config.parent / f"{peer}.json"
    words = [peer, str(config), str(batch), str(seq), str(WARM), str(STEPS), str(out)]
    why = done([sys.executable, str(PEER), *words], seconds)
    if why:
        return why
    found = json.loads(out.read_text())
    return Measured(found["speed"], found["peak"])
