"""How long compiling takes: `make sizes ARGS="[CASE ...] [--growth]"`.

Each case is one fresh `partc compile` process, from the command to the last file, that finds no earlier trace. Processor
seconds stand beside the seconds, since other work on the machine lengthens only the latter. The machine factor is the
time to import torch in units of one second: seconds of machines compare by their quotients with it.

`--growth` doubles depth, microbatches, ranks and experts of a small model, one at a time.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128_256,
    "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "hidden_act": "silu",
}  # fmt: skip
GPT2: Mapping[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 51_200, "n_positions": 2048,
}  # fmt: skip
CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "llama-405b": {**LLAMA, "hidden_size": 16_384, "intermediate_size": 53_248, "num_attention_heads": 128,
                   "num_hidden_layers": 126},
    "llama-8b": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32,
                 "num_hidden_layers": 32},
    "mt-nlg-530b": {**GPT2, "n_embd": 20_480, "n_head": 128, "n_layer": 105},
    "gpt-1t": {**GPT2, "n_embd": 25_600, "n_head": 160, "n_layer": 128},
    "qwen3-235b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096, "head_dim": 128,
        "intermediate_size": 12_288, "moe_intermediate_size": 1536, "num_attention_heads": 64,
        "num_key_value_heads": 4, "num_hidden_layers": 94, "num_experts": 128, "num_experts_per_tok": 8,
        "vocab_size": 151_936, "max_position_embeddings": 40_960,
    },
    "deepseek-v3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},  # its class's defaults
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A compile, and the processor seconds to reach on two cores."""

    name: str
    model: str
    mesh: str
    batch: int
    seq: int
    microbatches: int
    seconds: int
    options: tuple[str, ...] = ("--zero", "1")
    changes: Mapping[str, Any] = field(default_factory=dict)  # to the configuration


BIG = Case(
    name="405b", model="llama-405b", mesh="16x128x8", batch=2048, seq=8192, microbatches=16, seconds=15
)  # fmt: skip
CASES = (
    BIG,
    replace(
        BIG,
        name="405b-interleaved",
        seconds=25,
        options=("--zero", "1", "--schedule", "interleaved", "--virtual-stages", "8", "--memory-limit", "80GB"),
    ),
    replace(BIG, name="405b-zero3", microbatches=128, batch=16_384, seconds=25, options=("--zero", "3")),
    replace(BIG, name="405b-zero3-512", microbatches=512, batch=65_536, seconds=25, options=("--zero", "3")),
    Case(name="530b", model="mt-nlg-530b", mesh="35x8x8", batch=1920, seq=2048, microbatches=240, seconds=15),
    Case(name="1t", model="gpt-1t", mesh="64x6x8", batch=3072, seq=2048, microbatches=512, seconds=20),
    Case(name="qwen3", model="qwen3-235b", mesh="2x8x8", batch=64, seq=4096, microbatches=4, seconds=15),
    Case(name="deepseek", model="deepseek-v3", mesh="1x16x8", batch=64, seq=4096, microbatches=4, seconds=20),
    Case(name="8b", model="llama-8b", mesh="2x4x8", batch=16, seq=8192, microbatches=4, seconds=8),
)
SMALL = Case(
    name="small", model="llama-8b", mesh="4x4x2", batch=512, seq=512, microbatches=32, seconds=0
)  # fmt: skip
EXPERTS = Case(name="experts", model="qwen3-235b", mesh="2x4x2", batch=32, seq=512, microbatches=4, seconds=0)
GROWTH = (
    SMALL,
    replace(SMALL, name="depth x2", changes={"num_hidden_layers": 64}),
    replace(SMALL, name="microbatches x2", microbatches=64, batch=1024),
    replace(SMALL, name="stages x2", mesh="8x4x2"),
    replace(SMALL, name="ranks x2", mesh="4x8x2", batch=1024),
    replace(EXPERTS, changes={"num_hidden_layers": 8, "num_experts": 32}),
    replace(EXPERTS, name="experts x2", changes={"num_hidden_layers": 8, "num_experts": 64}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    seconds: float
    processor: float
    gib: float
    ranks: int
    status: int


def measure(case: Case) -> Measured:
    """One compile in a process of its own; its status is not 0 if it is refused, as by a memory limit."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / case.model / "config.json"
        model.parent.mkdir()
        model.write_text(json.dumps({**CONFIGURATIONS[case.model], **case.changes}))
        command = [sys.executable, "-m", "partc", "compile", f"hf:{model}", "--mesh", case.mesh, "--json"]
        command += ["--batch", str(case.batch), "--seq", str(case.seq), "--microbatches", str(case.microbatches)]
        command += ["--precision", "bf16", *case.options, "-o", f"{folder}/build"]
        environment = {**os.environ, "PARTC_CACHE": f"{folder}/cache"}
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
    return Measured(
        seconds=seconds,
        processor=usage.ru_utime + usage.ru_stime,
        gib=usage.ru_maxrss / 2**20,
        ranks=json.loads(output)["ranks"] if not status else 0,
        status=os.waitstatus_to_exitcode(status),
    )


def machine_factor() -> float:
    """Processor seconds to import torch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    wanted = [name for name in sys.argv[1:] if not name.startswith("--")]
    cases = GROWTH if "--growth" in sys.argv else CASES
    print(f"machine factor {machine_factor():.2f}\n")
    print("| case | mesh | microbatches | options | seconds | processor seconds | to reach | GiB | status |")
    print("|---|---|---:|---|---:|---:|---:|---:|---:|")
    for case in cases:
        if wanted and case.name not in wanted:
            continue
        found = measure(case)
        print(
            f"| {case.name} | {case.mesh} | {case.microbatches} | {' '.join(case.options)} | {found.seconds:.1f} "
            f"| {found.processor:.1f} | {case.seconds or ''} | {found.gib:.2f} | {found.status} |",
            flush=True,
        )


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
