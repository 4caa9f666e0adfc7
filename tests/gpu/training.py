"""Tokens a second and memory of training steps: the package on mesh 1 against one device's own ways."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
PEER = Path(__file__).with_name("peer.py")
WARM = 10
PACKAGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("partc, aten", "aten", ()),
    ("partc, triton", "triton", ()),
    ("partc, triton, CUDA graphs", "triton", ("--cuda-graphs",)),
)
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


def table(steps: int) -> bool:
    """Print it; whether the package is as fast as the best of its peers, in no more memory."""
    shown = Table("model", "", "tokens/s", "to the best peer", "GiB", title="Training in bf16, AdamW, one GPU")
    good = True
    for name, (config, batch, seq) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            found = {peer: _peer(peer, path, batch, seq, steps) for peer in PEERS}
            found |= {
                label: _package(label, kernels, path, batch, seq, steps, options)
                for label, kernels, options in PACKAGES
            }
        peers = [measured for peer in PEERS if (measured := found[peer]) is not None]
        best = max(peer.speed for peer in peers)
        for label, measured in found.items():
            if measured is None:
                shown.add_row(name, label, "failed", "", "")
                continue
            ratio = f"{measured.speed / best:.2f}"
            shown.add_row(name, label, f"{measured.speed:,.0f}", ratio, f"{measured.peak / 2**30:.2f}")
        ours = [measured for label, kernels, _ in PACKAGES if kernels == "triton" and (measured := found[label])]
        least = min(peer.peak for peer in peers)
        good = good and all(each.peak <= least for each in ours) and any(each.speed >= best for each in ours)
    Console(width=120).print(shown)
    return good


def _package(
    label: str, kernels: str, config: Path, batch: int, seq: int, steps: int, options: tuple[str, ...]
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
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(f"{' '.join(command)}\n{done.stdout[-3000:]}", flush=True)
    return done.returncode == 0
