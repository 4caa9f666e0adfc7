"""Predicted against published throughput of Megatron-LM: `python -m tests.benchmarks.published`, in five minutes.

The runs are those of Narayanan et al., SC 2021, Table 1 (A100), and of the table of weak scaling in Megatron-LM's README
(H100). Each is simulated as it was configured, as far as this is published: the A100 runs with full recomputation and attention
spelled out, the H100 runs with a distributed optimizer and fused attention. partc differs from those programs: it cuts
sequences between tensor-parallel products (2021's did not), and gathers updated parameters before the next step begins
(the H100 runs gather them beside its forward pass).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from partc.cluster.cluster import preset
from partc.compilation.plan import ParallelPlan
from partc.compilation.simulation import Simulator
from partc.cost.calibration import calibration

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

    @property
    def flops(self) -> float:
        """The flops of a step that the publication counts."""
        each = 96 if self.recompute == "full" else 72
        s, h, n = self.seq, self.hidden, self.layers
        head = self.vocab / ((16 if self.recompute == "full" else 12) * n * h)
        return each * self.batch * s * n * h * h * (1 + s / (6 * h) + head)

    @property
    def seconds(self) -> float:
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
        written = {"written": self.recompute == "full"}  # in 2021, attention was not fused
        sizes = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "seq": self.seq}
        return ParallelPlan(
            mesh=mesh,
            microbatches=self.batch // (dp * self.microbatch),
            schedule=schedule,
            virtual_stages=virtual,
            zero=self.zero,
            recompute=self.recompute,
            options={**written, **sizes, "vocab": self.vocab, "batch": self.batch},
        )


def _a100(name: str, *figures: float) -> Run:
    names = ("layers", "hidden", "heads", "tp", "pp", "gpus", "batch", "microbatch")
    return Run(name=name, device="A100-80GB", rate=figures[-1], **dict(zip(names, map(int, figures), strict=False)))


def _h100(name: str, *figures: float) -> Run:
    """The README does not give the microbatch: one sequence where there are several stages, else all four of a rank.

    Gathered sequences are gathered again in backward passes, as Megatron does.
    """
    names = ("layers", "hidden", "heads", "tp", "pp", "gpus", "batch")
    given = dict(zip(names, map(int, figures), strict=False))
    how = {
        "seq": 4096,
        "vocab": 131072,
        "recompute": "all_gather",
        "zero": 1,
        "microbatch": 1 if given["pp"] > 1 else 4,
    }
    return Run(name=name, device="H100-80GB", rate=figures[-1], **given, **how)  # type: ignore[arg-type]


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
)


def main() -> None:
    found: dict[str, list[tuple[float, float]]] = {}
    print(f"{'run':<17} {'mesh':<18} {'microbatches':>12} {'published':>11} {'predicted':>11}  error")
    for run in RUNS:
        cluster = preset(f"{-(-run.gpus // 8)}x8x{run.device}")
        seconds = Simulator(str(MODEL), cluster, calibration(cluster)).predict(run.plan).step_seconds
        found.setdefault(run.device, []).append((run.seconds, seconds))
        name, error = f"{run.device[:4]} {run.name}", seconds / run.seconds - 1
        figures = f"{run.plan.microbatches:>12} {run.seconds:>9.3f} s {seconds:>9.3f} s {error:>+6.1%}"
        print(f"{name:<17} {run.plan.mesh:<18} {figures}", flush=True)
    for device, pairs in found.items():
        errors = [predicted / published - 1 for published, predicted in pairs]
        mean, bias = sum(map(abs, errors)) / len(errors), sum(errors) / len(errors)
        print(f"{device}: mean error {mean:.1%}, bias {bias:+.1%}")


if __name__ == "__main__":
    main()
