"""The options of a compile as given, before any check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partc.ir.mesh import Mesh

KERNELS = ("auto", "triton", "aten", "inductor")
SUMS = ("fp32", "bf16")
COMPRESSIONS = ("none", "bf16", "int8")
BUCKET = "25MB"  # the size of a gradient bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOptions:
    """The options of a compile, as given to the command line or `partc.compile`; only this class has their defaults."""

    mesh: str | Mesh
    experts: str | None = None
    microbatches: int = 1
    schedule: str | Path = "1f1b"
    virtual_stages: int | None = None  # stages per pipeline rank; None: the schedule's default
    stage_calls: str | Sequence[int] | None = None  # calls of each stage; None: stages with about the same work
    precision: str = "fp32"
    seed: int = 0
    shard: Sequence[str] = ()
    batch_over: str | None = None  # the calls whose batch tp or cp cuts: "tp=embed,blocks.0-15"
    zero: str | int = "0"
    recompute: str = "none"
    casts: Sequence[str] = ()
    kernels: str = "auto"
    bucket: str = BUCKET
    memory_limit: str | None = None
    nodes: int | None = None
    grad_reduce: str = "fp32"
    compress_grads: str = "none"
    loss_chunks: int = 1
    expert_capacity: str | float | None = None
    expert_rows: float | None = None  # rows of a rank's experts in the memory account, as a multiple of the mean
    router_bias_rate: float = 0.0  # the size of the update of routers' biases; 0 for none
    cuda_graphs: bool = False
    # Name and options, as in `sgd:momentum=0.9`; None: the model file's optimizer, or AdamW.
    optimizer: str | None = None
    group: Sequence[str] = ()  # options of the optimizer for some parameters
    lr: float | None = None  # train.py's default
    eval_every: int = 0  # train.py's default
    forward_only: bool = False


DEFAULTS: Mapping[str, object] = {item.name: item.default for item in fields(GivenOptions) if item.name != "mesh"}
_APART = ("microbatches", "precision", "seed", "memory_limit")  # fields of a plan, or checked once
# The options that a package's plan records as its command -> the values that it omits.
RECORDED: Mapping[str, object] = {
    **{name: value for name, value in DEFAULTS.items() if name not in _APART},
    "kernels": "aten",
}
