"""Tokens a second and memory of training steps: the package on mesh 1 against one device's own ways."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
PEER = Path(__file__).with_name("peer.py")
WARM = 10
MOST_SECONDS = 1200  # of one process: what takes longer has failed
LABELS: Mapping[str, tuple[str, tuple[str, ...]]] = {  # kernels, and options of train.py
    "partc, aten": ("aten", ()),
    "partc, triton": ("triton", ()),
    "partc, triton, CUDA graphs": ("triton", ("--cuda-graphs",)),
}
PEERS = ("eager", "compile", "max-autotune", "liger")
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12,
    "n_head": 12, "n_positions": 1024, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {"GPT-2 124M": (GPT2, 16, 1024), "Llama 1B": (LLAMA, 4, 2048)}


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens a second of the median step, and the most bytes held."""

    speed: float
    peak: int


def table(steps: int, only: tuple[str, ...]) -> bool:
    """Print it; whether the package is as fast as the best of its peers, in no more memory.

    Rows are printed as they are measured. `only` those that have one of these in their names, if there are any.
    """
    shown = Table("model", "", "tokens/s", "to the best peer", "GiB", title="Training in bf16, AdamW, one GPU")
    good = True
    for name, (config, batch, seq) in MODELS.items():
        wanted = [label for label in (*PEERS, *LABELS) if not only or any(text in f"{name}, {label}" for text in only)]
        found: dict[str, Measured | None] = {}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            for label in wanted:
                how = (path, batch, seq, steps)
                found[label] = _peer(label, *how) if label in PEERS else _package(label, *LABELS[label], *how)
                print(f"{name}, {label}: {_said(found[label])}", flush=True)
        peers = [measured for label in PEERS if (measured := found.get(label))]
        ours = [measured for label in LABELS if "triton" in label and (measured := found.get(label))]
        best = max((peer.speed for peer in peers), default=0.0)
        for label, measured in found.items():
            ratio = f"{measured.speed / best:.2f}" if measured and best else ""
            row = (f"{measured.speed:,.0f}", ratio, f"{measured.peak / 2**30:.2f}") if measured else ("failed", "", "")
            shown.add_row(name, label, *row)
        if len(peers) < len(PEERS) and not only:
            print(f"{name}: not all peers ran, so the package may be compared with too slow ones", flush=True)
        least = min((peer.peak for peer in peers), default=0)
        fast = any(each.speed >= best for each in ours) and all(each.peak <= least for each in ours)
        good = good and (fast or not (peers and ours)) and None not in found.values()
    Console(width=120).print(shown)
    return good


def _said(measured: Measured | None) -> str:
    return f"{measured.speed:,.0f} tokens/s, {measured.peak / 2**30:.2f} GiB" if measured else "failed"


def _package(
    label: str, kernels: str, options: tuple[str, ...], config: Path, batch: int, seq: int, steps: int
) -> Measured | None:
    build, metrics = config.parent / f"build {label}", config.parent / f"metrics {label}.jsonl"
    sizes = ["--batch", str(batch), "--seq", str(seq)]
    compiled = [sys.executable, "-m", "partc", "compile", f"hf:{config}", "--mesh", "1", "--precision", "bf16", *sizes]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    run += [str(build / "train.py"), "--steps", str(WARM + steps), "--metrics", str(metrics), *options]
    for command in ([*compiled, "--kernels", kernels, "-o", str(build)], run):
        if not _done(command):
            return None
    lines = [json.loads(line) for line in metrics.read_text().splitlines()][WARM:]
    speeds = sorted(line["tokens_per_second"] for line in lines)
    return Measured(speeds[len(speeds) // 2], max(line["peak_bytes"] for line in lines))


def _peer(peer: str, config: Path, batch: int, seq: int, steps: int) -> Measured | None:
    out = config.parent / f"{peer}.json"
    words = [peer, str(config), str(batch), str(seq), str(WARM), str(steps), str(out)]
    if not _done([sys.executable, str(PEER), *words]):
        return None
    found = json.loads(out.read_text())
    return Measured(found["speed"], found["peak"])


def _done(command: list[str]) -> bool:
    """A failure is shown, and its row says so."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
        print(f"{' '.join(command)}\ntook more than {MOST_SECONDS} s", flush=True)
        return False
    if done.returncode:
        print(f"{' '.join(command)}\n{done.stdout[-3000:]}", flush=True)
    return done.returncode == 0
