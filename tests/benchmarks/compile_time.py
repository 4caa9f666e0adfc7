"""Compile times: `make sizes ARGS="[CASE ...] [--growth]"`.

Each case is one fresh `partc compile` process, from the command to the last file, that finds no earlier trace. Processor
seconds are printed next to the seconds, since other work on the machine lengthens only the latter. The machine factor is the
time to import torch in units of one second: seconds of machines compare by their quotients with it.

`--growth` doubles depth, microbatches, stages, ranks, virtual stages and experts at true sizes, one at a time, and
counts function calls by Python's profiler: they do not depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
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
    "mixtral-8x22b": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 6144,
        "intermediate_size": 16_384, "num_attention_heads": 48, "num_key_value_heads": 8, "num_hidden_layers": 56,
        "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32_768, "max_position_embeddings": 65_536,
    },
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
EXPERTS = ("--zero", "1", "--experts")
MIXTURES = (
    Case(
        name="mixtral", model="mixtral-8x22b", mesh="pp=4,dp=16,tp=8", batch=256, seq=4096, microbatches=8, seconds=20,
        options=(*EXPERTS, "ep=8@dp"),
    ),
    Case(
        name="qwen3-cp", model="qwen3-235b", mesh="pp=2,dp=16,cp=2,tp=8", batch=64, seq=4096, microbatches=4,
        seconds=20, options=(*EXPERTS, "ep=16@dp"),
    ),
    Case(
        name="qwen3-2048", model="qwen3-235b", mesh="pp=4,dp=64,tp=8", batch=512, seq=4096, microbatches=8,
        seconds=20, options=(*EXPERTS, "ep=64@dp"),
    ),
    Case(
        name="deepseek-2048", model="deepseek-v3", mesh="pp=16,dp=16,tp=8", batch=1024, seq=4096, microbatches=32,
        seconds=20, options=(*EXPERTS, "ep=16@dp"),
    ),
    Case(
        name="deepseek-cp", model="deepseek-v3", mesh="pp=8,dp=16,cp=2,tp=8", batch=512, seq=4096, microbatches=16,
        seconds=20, options=(*EXPERTS, "ep=32@dp,cp"),
    ),
)  # fmt: skip


def deeper(case: Case, name: str, layers: int) -> Case:
    return replace(case, name="layers", changes={name: layers})


NAMED = {case.name: case for case in (*CASES, *MIXTURES)}
VIRTUAL = replace(BIG, options=("--zero", "1", "--schedule", "interleaved", "--virtual-stages", "4"))
BUBBLES = replace(BIG, options=("--zero", "1", "--schedule", "zero-bubble"))
ZERO3 = NAMED["405b-zero3"]
GROWTH: tuple[tuple[Case, tuple[Case, ...]], ...] = (
    (
        BIG,
        (
            deeper(BIG, "num_hidden_layers", 252),
            replace(BIG, name="microbatches", microbatches=32, batch=4096),
            replace(BIG, name="stages", mesh="32x64x8"),
            replace(BIG, name="ranks", mesh="16x256x8", batch=4096),
        ),
    ),
    (
        ZERO3,
        (
            deeper(ZERO3, "num_hidden_layers", 252),
            replace(ZERO3, name="microbatches", microbatches=256, batch=32_768),
            replace(ZERO3, name="ranks", mesh="16x256x8", batch=32_768),
        ),
    ),
    (
        VIRTUAL,
        (
            deeper(VIRTUAL, "num_hidden_layers", 252),
            replace(VIRTUAL, name="microbatches", microbatches=32, batch=4096),
            replace(VIRTUAL, name="virtual stages", options=(*VIRTUAL.options[:-1], "8")),
        ),
    ),
    (BUBBLES, (deeper(BUBBLES, "num_hidden_layers", 252), replace(BUBBLES, name="microbatches", microbatches=32))),
    (NAMED["530b"], (deeper(NAMED["530b"], "n_layer", 210),)),
    (NAMED["1t"], (deeper(NAMED["1t"], "n_layer", 256), replace(NAMED["1t"], name="microbatches", microbatches=1024))),
    (
        NAMED["qwen3"],
        (
            deeper(NAMED["qwen3"], "num_hidden_layers", 188),
            replace(NAMED["qwen3"], name="experts", changes={"num_experts": 256}),
        ),
    ),
    (
        NAMED["deepseek-2048"],
        (
            deeper(NAMED["deepseek-2048"], "num_hidden_layers", 122),
            replace(NAMED["deepseek-2048"], name="experts", changes={"n_routed_experts": 512}),
        ),
    ),
    (
        NAMED["mixtral"],
        (
            deeper(NAMED["mixtral"], "num_hidden_layers", 112),
            replace(NAMED["mixtral"], name="experts", changes={"num_local_experts": 16}),
        ),
    ),
)
# A compile under the profiler; its last line on stderr is the number of function calls.
COUNTING = """
import cProfile, pstats, sys
profile = cProfile.Profile()
profile.enable()
from partc.cli import main
status = main(sys.argv[1:])
profile.disable()
print(pstats.Stats(profile).total_calls, file=sys.stderr)
sys.exit(status)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    seconds: float
    processor: float
    gib: float
    ranks: int
    status: int
    calls: int


def measure(case: Case, *, counted: bool = False) -> Measured:
    """One compile in a process of its own; its status is not 0 if it is refused, as by a memory limit.

    Function calls are `counted` under the profiler, which takes twice the time.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / case.model / "config.json"
        model.parent.mkdir()
        model.write_text(json.dumps({**CONFIGURATIONS[case.model], **case.changes}))
        command = [sys.executable, *(("-c", COUNTING) if counted else ("-m", "partc")), "compile", f"hf:{model}"]
        command += ["--mesh", case.mesh, "--json"]
        command += ["--batch", str(case.batch), "--seq", str(case.seq), "--microbatches", str(case.microbatches)]
        command += ["--precision", "bf16", *case.options, "-o", f"{folder}/build"]
        environment = {**os.environ, "PARTC_CACHE": f"{folder}/cache"}
        start = time.perf_counter()
        with (Path(folder) / "stderr").open("w") as told:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, env=environment)
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        *_, last = (Path(folder) / "stderr").read_text().splitlines() or [""]
        seconds = time.perf_counter() - start
    return Measured(
        seconds=seconds,
        processor=usage.ru_utime + usage.ru_stime,
        gib=usage.ru_maxrss / 2**20,
        ranks=json.loads(output)["ranks"] if not status else 0,
        status=os.waitstatus_to_exitcode(status),
        calls=int(last) if counted else 0,
    )


def machine_factor() -> float:
    """Processor seconds to import torch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def growth(wanted: Collection[str]) -> None:
    """Print the function calls of compiles, and of those with one size doubled."""
    print("| case | mesh | options | millions of calls | doubled | millions of calls | more |")
    print("|---|---|---|---:|---|---:|---:|")
    for case, doubled in GROWTH:
        if wanted and case.name not in wanted:
            continue
        before = measure(case, counted=True).calls
        for other in doubled:
            after = measure(other, counted=True).calls
            print(
                f"| {case.name} | {case.mesh} | {' '.join(case.options)} | {before / 1e6:.1f} | {other.name} "
                f"| {after / 1e6:.1f} | {after / before - 1:+.0%} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(NAMED)}; default: all")
    parser.add_argument("--growth", action="store_true", help="double sizes, and count function calls")
    given = parser.parse_args()
    wanted = given.cases
    if unknown := set(wanted) - {*NAMED, *(case.name for case, _ in GROWTH)}:
        parser.error(f"no case {', '.join(sorted(unknown))}")
    if given.growth:
        growth(wanted)
        return
    print(f"machine factor {machine_factor():.2f}\n")
    print("| case | mesh | microbatches | options | seconds | processor seconds | to reach | GiB | status |")
    print("|---|---|---:|---|---:|---:|---:|---:|---:|")
    for case in NAMED.values():
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
