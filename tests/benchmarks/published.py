"""Predicted against published throughput: `python -m tests.benchmarks.published`, in six minutes.

The runs are those of Narayanan et al., SC 2021, Table 1 (A100), of the table of weak scaling in Megatron-LM's README
(H100), and some of each size and length in the tables of MosaicML's llm-foundry (scripts/train/benchmarking/README.md:
A100 and H100, sharded parameters). Each is simulated as it was configured, as far as this is published: the A100 runs
of 2021 with full recomputation and attention spelled out, the others with fused attention, those on H100 with a
distributed optimizer, and Megatron's on H100 with tensor-parallel collectives in pieces beside products. partc differs
from those of 2021, as it cuts sequences between tensor-parallel products.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from partc.cluster.cluster import preset
from partc.compilation.plan import ParallelPlan
from partc.compilation.simulation import Simulator
from partc.cost.calibration import calibration
from tests.benchmarks.comparison import rank_correlation, summary

MODEL = Path(__file__).parent.parent / "models" / "gpt.py"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run; `rate` is in 10^12 flops a second and GPU, of the model or (with recomputation) the hardware."""

    name: str
    device: str
    layers: int
    hidden: int
    heads: int
    tp: int
    pp: int
    gpus: int
    batch: int
    microbatch: int
    rate: float
    seq: int = 2048
    vocab: int = 51200
    recompute: str = "full"
    zero: int = 0
    written: bool = False  # attention is spelled out
    tokens: int = 0  # a second and GPU; 0: `rate` is published
    table: str = "Megatron-LM"
    precision: str = "bf16"

    @property
    def flops(self) -> float:
        """The flops of a step that Megatron-LM's publications count."""
        each = 96 if self.recompute == "full" else 72
        s, h, n = self.seq, self.hidden, self.layers
        head = self.vocab / ((16 if self.recompute == "full" else 12) * n * h)
        return each * self.batch * s * n * h * h * (1 + s / (6 * h) + head)

    @property
    def seconds(self) -> float:
        if self.tokens:
            return self.batch * self.seq / (self.tokens * self.gpus)
        return self.flops / (self.rate * 1e12 * self.gpus)

    @property
    def virtual(self) -> int:
        """Interleaved stages of a rank, which are not published: up to eight if so many divide its layers."""
        each = self.layers // self.pp
        several = [v for v in range(2, each + 1) if each % v == 0]
        return 1 if self.pp == 1 else max([v for v in several if v <= 8], default=several[0])

    @property
    def plan(self) -> ParallelPlan:
        dp = self.gpus // (self.tp * self.pp)
        mesh = f"pp={self.pp},dp={dp},tp={self.tp}"
        schedule, virtual = ("interleaved", self.virtual) if self.virtual > 1 else ("1f1b", 1)
        written = {"written": self.written}
        sizes = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "seq": self.seq}
        return ParallelPlan(
            mesh=mesh,
            microbatches=self.batch // (dp * self.microbatch),
            schedule=schedule,
            virtual_stages=virtual,
            zero=self.zero,
            recompute=self.recompute,
            precision=self.precision,
            tp_overlap=self.table == "Megatron-LM" and self.device.startswith("H100"),
            options={**written, **sizes, "vocab": self.vocab, "batch": self.batch},
        )


def _a100(name: str, *figures: float) -> Run:
    names = ("layers", "hidden", "heads", "tp", "pp", "gpus", "batch", "microbatch")
    given = dict(zip(names, map(int, figures), strict=False))
    return Run(name=name, device="A100-80GB", rate=figures[-1], written=True, **given)


def _h100(name: str, *figures: float) -> Run:
    """The README does not give the microbatch: one sequence where there are several stages, else all four of a rank."""
    names = ("layers", "hidden", "heads", "tp", "pp", "gpus", "batch")
    given = dict(zip(names, map(int, figures), strict=False))
    how = {
        "seq": 4096,
        "vocab": 131072,
        "recompute": "none",
        "zero": 1,
        "microbatch": 1 if given["pp"] > 1 else 4,
    }
    return Run(name=name, device="H100-80GB", rate=figures[-1], **given, **how)  # type: ignore[arg-type]


_SHAPES = {  # of MPT: layers, hidden, heads
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16),
    "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip


def _mosaic(device: str, name: str, *figures: int, again: bool = False, precision: str = "bf16") -> Run:
    """Sequence, GPUs, microbatch, microbatches of a step, tokens a second and GPU; with full recomputation or none."""
    table = "llm-foundry" if precision == "bf16" else f"llm-foundry {precision}"
    seq, gpus, microbatch, times, tokens = figures
    layers, hidden, heads = _SHAPES[name]
    return Run(
        name=f"{name} {seq}", device=device, table=table, precision=precision, layers=layers, hidden=hidden, heads=heads, tp=1, pp=1,
        gpus=gpus, batch=microbatch * times * gpus, microbatch=microbatch, rate=0.0, seq=seq, vocab=50368, zero=3,
        recompute="full" if again else "none", tokens=tokens,
    )  # fmt: skip


RUNS = (
    _a100("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 137),
    _a100("3.6B", 30, 3072, 32, 2, 1, 64, 512, 16, 138),
    _a100("7.5B", 36, 4096, 32, 4, 1, 128, 512, 16, 142),
    _a100("18B", 40, 6144, 48, 8, 1, 256, 1024, 8, 135),
    _a100("39B", 48, 8192, 64, 8, 2, 512, 1536, 4, 138),
    _a100("76B", 60, 10240, 80, 8, 4, 1024, 1792, 2, 140),
    _a100("145B", 80, 12288, 96, 8, 8, 1536, 2304, 2, 148),
    _a100("310B", 96, 16384, 128, 8, 16, 1920, 2160, 1, 155),
    _a100("530B", 105, 20480, 128, 8, 35, 2520, 2520, 1, 163),
    _a100("1T", 128, 25600, 160, 8, 64, 3072, 3072, 1, 163),
    _h100("1.7B", 24, 2048, 16, 1, 1, 48, 192, 408.8),
    _h100("7.1B", 30, 4096, 32, 2, 1, 96, 192, 465.9),
    _h100("16B", 32, 6144, 48, 4, 1, 192, 192, 489.1),
    _h100("32B", 48, 7168, 56, 8, 1, 384, 192, 459.6),
    _h100("70B", 84, 8192, 64, 8, 2, 768, 384, 419.7),
    _h100("119B", 92, 10240, 80, 8, 4, 1536, 768, 420.5),
    _h100("177B", 96, 12288, 96, 8, 6, 2304, 1152, 432.8),
    _h100("314B", 96, 16384, 128, 8, 8, 3072, 1536, 474.4),
    _h100("462B", 112, 18432, 144, 8, 16, 6144, 3072, 459.9),
    _mosaic("A100-80GB", "125m", 2048, 8, 32, 2, 141737),
    _mosaic("A100-80GB", "350m", 2048, 8, 32, 2, 58782),
    _mosaic("A100-80GB", "760m", 2048, 8, 24, 2, 32434),
    _mosaic("A100-80GB", "1b", 2048, 8, 14, 4, 20513),
    _mosaic("A100-80GB", "1b", 8192, 8, 3, 4, 13814),
    _mosaic("A100-80GB", "3b", 2048, 8, 10, 2, 10811),
    _mosaic("A100-80GB", "3b", 8192, 8, 3, 6, 7695),
    _mosaic("A100-80GB", "7b", 2048, 8, 6, 2, 4641),
    _mosaic("A100-80GB", "7b", 8192, 8, 8, 2, 3206, again=True),
    _mosaic("A100-80GB", "7b", 32768, 8, 2, 2, 1672, again=True),
    _mosaic("A100-80GB", "13b", 2048, 8, 2, 3, 2262),
    _mosaic("A100-80GB", "13b", 4096, 8, 10, 3, 2060, again=True),
    _mosaic("A100-80GB", "30b", 2048, 8, 3, 21, 916, again=True),
    _mosaic("A100-80GB", "70b", 2048, 64, 8, 4, 410, again=True),
    _mosaic("A100-80GB", "70b", 2048, 32, 2, 16, 373, again=True),
    _mosaic("H100-80GB", "760m", 2048, 16, 24, 1, 68551),
    _mosaic("H100-80GB", "1b", 2048, 8, 14, 1, 45455),
    _mosaic("H100-80GB", "1b", 2048, 64, 20, 1, 44402),
    _mosaic("H100-80GB", "1b", 8192, 8, 3, 4, 29157),
    _mosaic("H100-80GB", "1b", 32768, 8, 1, 4, 12025),
    _mosaic("H100-80GB", "3b", 2048, 16, 10, 3, 24142),
    _mosaic("H100-80GB", "3b", 8192, 8, 3, 6, 16578),
    _mosaic("H100-80GB", "3b", 512, 8, 40, 6, 27965),
    _mosaic("H100-80GB", "7b", 2048, 8, 6, 1, 10643),
    _mosaic("H100-80GB", "7b", 4096, 8, 16, 2, 8611, again=True),
    _mosaic("H100-80GB", "7b", 32768, 8, 2, 2, 3318, again=True),
    _mosaic("H100-80GB", "13b", 2048, 8, 2, 1, 4792),
    _mosaic("H100-80GB", "13b", 2048, 64, 2, 1, 4800),
    _mosaic("H100-80GB", "30b", 2048, 8, 3, 21, 2002, again=True),
    _mosaic("H100-80GB", "30b", 2048, 32, 14, 3, 2308, again=True),
    _mosaic("H100-80GB", "30b", 8192, 8, 1, 21, 1384, again=True),
    _mosaic("H100-80GB", "70b", 2048, 64, 8, 4, 1039, again=True),
    _mosaic("H100-80GB", "70b", 2048, 32, 2, 16, 882, again=True),
    _mosaic("H100-80GB", "1b", 512, 8, 56, 4, 70315, precision="fp8"),
    _mosaic("H100-80GB", "1b", 8192, 8, 2, 4, 32010, precision="fp8"),
    _mosaic("H100-80GB", "1b", 32768, 8, 1, 4, 12580, precision="fp8"),
    _mosaic("H100-80GB", "3b", 512, 8, 40, 6, 36527, precision="fp8"),
    _mosaic("H100-80GB", "3b", 2048, 8, 10, 6, 30586, precision="fp8"),
    _mosaic("H100-80GB", "3b", 8192, 8, 3, 6, 19146, precision="fp8"),
    _mosaic("H100-80GB", "3b", 32768, 8, 3, 6, 5856, again=True, precision="fp8"),
)


def main() -> None:
    found: dict[str, list[tuple[Run, float]]] = {}
    print(f"{'run':<17} {'mesh':<18} {'microbatches':>12} {'published':>11} {'predicted':>11}  error  memory")
    simulators: dict[str, Simulator] = {}
    for run in RUNS:
        cluster = preset(f"{-(-run.gpus // 8)}x8x{run.device}")
        prediction = simulators.setdefault(cluster.name, Simulator(str(MODEL), cluster, calibration(cluster))).predict(
            run.plan
        )
        seconds = prediction.step_seconds
        found.setdefault(f"{run.table}, {run.device[:4]}", []).append((run, seconds))
        name, error = f"{run.device[:4]} {run.name}", seconds / run.seconds - 1
        figures = f"{run.plan.microbatches:>12} {run.seconds:>9.3f} s {seconds:>9.3f} s {error:>+6.1%}"
        memory = f"{prediction.memory_bytes / 1e9:.0f} GB{'' if prediction.fits else ', does not fit'}"
        print(f"{name:<17} {run.plan.mesh:<18} {figures}  {memory}", flush=True)
    for table, pairs in found.items():
        errors = [predicted / run.seconds - 1 for run, predicted in pairs]
        # Ranks of flops a second and GPU, which are comparable between sizes and clusters.
        published = [run.flops / (run.seconds * run.gpus) for run, _ in pairs]
        predicted = [run.flops / (seconds * run.gpus) for run, seconds in pairs]
        print(f"{table}: {len(pairs)} runs, {summary(errors, rank_correlation(published, predicted))}")


if __name__ == "__main__":
    main()
