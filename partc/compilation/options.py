"""The user's decisions about a compile, checked."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partc.cost.saved_tensors import parse_bytes
from partc.errors import PartcError
from partc.ir.capacity import Capacity
from partc.ir.mesh import PIPELINE_AXIS, Mesh, holds_weights_whole
from partc.ir.program import MOVING, PRECISIONS, DType
from partc.rules import LOWERED, Precision, operations
from partc.schedules import SCHEDULES, stage_ranks
from partc.schedules.per_stage import expanded, stage_kinds
from partc.schedules.table import Table, read
from partc.sharding.pins import Pin

KERNELS = ("auto", "triton", "aten", "inductor")
RECOMPUTE = ("none", "selective", "full")
LOW: Mapping[str, DType] = {"bf16": "bf16", "fp16": "f16"}
SUMS = ("fp32", "bf16")
COMPRESSIONS = ("none", "bf16", "int8")
BUCKET = "25MB"  # of gradients that are summed together
DEFAULT = "adamw"  # train.py's own optimizer; importing it from there would import torch
TABLE = "schedule.csv"  # the file of a package that has the user's table


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The mesh and the decisions about its use."""

    mesh: Mesh
    microbatches: int = 1
    schedule: str = "1f1b"
    virtual_stages: int | None = None  # on each pipeline rank; None: the schedule's default
    table: Table | None = None  # the contents of the file that `schedule` names
    stage_calls: tuple[int, ...] = ()  # of each stage; without them, stages have about the same work
    precision: str = "fp32"
    seed: int = 0
    shard: tuple[str, ...] = ()
    zero: int = 0
    zero_axes: tuple[str, ...] = ()
    recompute: str = "none"
    casts: tuple[str, ...] = ()
    kernels: str = "aten"  # settled: never auto
    bucket: str = BUCKET
    memory_limit: int | None = None  # bytes that a rank may hold
    nodes: int | None = None
    expert_axes: tuple[str, ...] = ()
    grad_reduce: str = "fp32"
    compress_grads: str = "none"
    loss_chunks: int = 1
    expert_capacity: Capacity | None = None
    expert_rows: float | None = None  # times the mean, that come for a rank's experts in the memory account
    router_bias_rate: float = 0.0  # the size of the update of routers' biases; 0 for none
    cuda_graphs: bool = False
    optimizer: str = DEFAULT  # with options, as in `sgd:momentum=0.9`: train.py's default
    group: tuple[str, ...] = ()  # options of the optimizer for some parameters
    lr: float | None = None  # train.py's default
    eval_every: int = 0  # train.py's default
    forward_only: bool = False
    chosen: bool = False  # whether optimizer and group are given: else a model file's optimizer() decides

    @classmethod
    def checked(
        cls,
        *,
        mesh: str | Mesh,
        microbatches: int,
        schedule: str | Path,
        precision: str,
        seed: int,
        shard: Sequence[str],
        virtual_stages: int | None = None,
        stage_calls: str | Sequence[int] | None = None,
        zero: str | int = 0,
        recompute: str = "none",
        casts: Sequence[str] = (),
        kernels: str = "auto",
        bucket: str = BUCKET,
        memory_limit: str | None = None,
        nodes: int | None = None,
        experts: str | None = None,
        grad_reduce: str = "fp32",
        compress_grads: str = "none",
        loss_chunks: int = 1,
        expert_capacity: str | float | None = None,
        expert_rows: float | None = None,
        router_bias_rate: float = 0.0,
        cuda_graphs: bool = False,
        optimizer: str | None = None,
        group: Sequence[str] = (),
        lr: float | None = None,
        eval_every: int = 0,
        forward_only: bool = False,
    ) -> Options:
        """Check raw values and build the options.

        Raises PartcError P0004, P0101 to P0106, P0108, P0109, P0301, P0404 to P0414, P0418, P0421 and P0551.
        """
        parsed = mesh if isinstance(mesh, Mesh) else Mesh.parse(mesh)
        expert_axes: tuple[str, ...] = ()
        if experts is not None:
            parsed, expert_axes = parsed.with_experts(experts)
        if nodes is not None:
            parsed = parsed.cut_at(nodes)
        if microbatches < 1:
            raise PartcError("P0405", f"there cannot be {microbatches} microbatches", help="give 1 or more")
        if loss_chunks < 1:
            raise PartcError("P0418", f"a loss cannot be made in {loss_chunks} chunks", help="give 1 or more")
        if not 0 <= router_bias_rate < math.inf:
            raise PartcError(
                "P0004", f"--router-bias-rate {router_bias_rate} is out of range", help="give 0 or more, such as 1e-3"
            )
        if router_bias_rate and (grad_reduce, compress_grads) != ("fp32", "none"):
            raise PartcError(
                "P0108",
                "--router-bias-rate counts rows with the gradients, and numbers of 16 or 8 bits would round the counts",
                help="leave out --grad-reduce and --compress-grads, or --router-bias-rate",
            )
        if not 0 <= seed < 2**32:
            raise PartcError("P0004", f"--seed {seed} is out of range", help="give one from 0 to 4294967295")
        if precision not in PRECISIONS:
            raise _unknown("precision", precision, PRECISIONS)
        known = {*operations(), *LOWERED, *MOVING}
        for kind in stage_kinds(recompute) if parse_bytes(recompute) is None else ():
            if kind not in RECOMPUTE and not known.issuperset(kind.split(",")):
                raise _unknown("recomputation", kind, (*RECOMPUTE, "a budget such as 18GB", "names of operations"))
        if parse_bytes(bucket) is None:
            raise _unknown("size", bucket, ("25MB", "512KiB", "0B"))
        schedule, table = str(schedule), None
        if schedule.lower().endswith(".csv"):
            table = read(Path(schedule), ranks=parsed.axis(PIPELINE_AXIS), microbatches=microbatches)
            if virtual_stages is not None:
                raise PartcError(
                    "P0406", f"{schedule} says itself which stages a rank has", help="leave out --virtual-stages"
                )
        elif schedule not in SCHEDULES:
            raise _unknown("schedule", schedule, (*SCHEDULES, "FILE.csv"))
        for text in shard:
            Pin.parse(text)
        for text in casts:
            _cast(text)
        if casts and precision not in LOW:
            raise PartcError("P0414", f"--cast has no use with --precision {precision}", help="add --precision bf16")
        if memory_limit is not None and parse_bytes(memory_limit) is None:
            raise PartcError("P0004", f"--memory-limit {memory_limit} is no size", help="for example 80GB or 64GiB")
        if kernels not in KERNELS:
            raise _unknown("kind of kernels", kernels, KERNELS)
        if grad_reduce not in SUMS:
            raise _unknown("type for sums of gradients", grad_reduce, SUMS)
        if compress_grads not in COMPRESSIONS:
            raise _unknown("compression", compress_grads, COMPRESSIONS)
        chosen = optimizer is not None or bool(group)
        if chosen:
            optimizer = _optimizer(optimizer or DEFAULT, group)
        if lr is not None and not 0 <= lr < math.inf:
            raise PartcError("P0004", f"--lr {lr} is out of range", help="give a number of 0 or more")
        if eval_every < 0:
            raise PartcError("P0004", f"--eval-every {eval_every} is out of range", help="give a number of 0 or more")
        if expert_rows is not None and not 1 <= expert_rows < math.inf:
            raise PartcError(
                "P0004", f"--expert-rows {expert_rows:g} is out of range", help="give a number of 1 or more"
            )
        parsed, level, axes = _zero(str(zero), parsed)
        options = cls(
            mesh=parsed,
            microbatches=microbatches,
            schedule=schedule,
            virtual_stages=virtual_stages,
            table=table,
            stage_calls=_stage_calls(stage_calls),
            precision=precision,
            seed=seed,
            shard=tuple(shard),
            zero=level,
            zero_axes=axes,
            recompute=recompute,
            casts=tuple(casts),
            kernels=_settled(kernels),
            bucket=bucket,
            memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
            nodes=nodes,
            expert_axes=expert_axes or parsed.expert_axes,
            grad_reduce=grad_reduce,
            compress_grads=compress_grads,
            loss_chunks=loss_chunks,
            expert_capacity=None if expert_capacity is None else Capacity.parse(str(expert_capacity)),
            expert_rows=expert_rows,
            router_bias_rate=router_bias_rate,
            cuda_graphs=cuda_graphs,
            optimizer=optimizer or DEFAULT,
            group=tuple(group),
            lr=lr,
            eval_every=eval_every,
            forward_only=forward_only,
            chosen=chosen,
        )
        for text, number in (
            (f"--stage-calls {stage_calls}", len(options.stage_calls)),
            (f"--recompute {recompute}", len(stage_kinds(recompute))),
        ):
            if number > 1 and number != len(options.places):  # which raises if the number of stages is invalid
                raise PartcError(
                    "P0421",
                    f"{text} is for {number} stages, and there are {len(options.places)}",
                    help="give one for each stage, in the order of the calls; 3*8 stands for eight times 3",
                )
        return options

    @property
    def places(self) -> tuple[int, ...]:
        """The pipeline rank of every stage. Raises PartcError P0406."""
        if self.table is not None:
            return self.table.places
        kind = SCHEDULES[self.schedule]
        ranks = self.mesh.axis(PIPELINE_AXIS)
        each = kind.stages_per_rank if self.virtual_stages is None else self.virtual_stages
        return stage_ranks(kind, ranks, ranks * each)

    @property
    def budget(self) -> int | None:
        """The bytes that a rank may hold, if recomputation has a budget; else None."""
        return parse_bytes(self.recompute)

    @property
    def split_backward(self) -> bool:
        """Whether some backward passes run as two halves (I and W)."""
        return SCHEDULES[self.schedule].split_backward if self.table is None else self.table.split_backward

    @property
    def command(self) -> dict[str, Any]:
        """The options that the plan records, so that the compile can be repeated."""
        found: dict[str, Any] = {"schedule": self.schedule if self.table is None else TABLE}
        found["shard"] = list(self.shard)
        if self.casts:
            found["casts"] = list(self.casts)
        if self.stage_calls:
            found["stage_calls"] = ",".join(map(str, self.stage_calls))
        if self.zero:
            found["zero"] = f"{self.zero}@{','.join(self.zero_axes)}" if self.zero_axes else str(self.zero)
        if self.recompute != "none":
            found["recompute"] = self.recompute
        if self.kernels != "aten":
            found["kernels"] = self.kernels
        if self.bucket != BUCKET:
            found["bucket"] = self.bucket
        if self.nodes is not None:
            found["nodes"] = self.nodes
        if self.expert_axes != self.mesh.expert_axes:
            found["experts"] = ",".join(self.expert_axes)
        if self.grad_reduce != "fp32":
            found["grad_reduce"] = self.grad_reduce
        if self.compress_grads != "none":
            found["compress_grads"] = self.compress_grads
        if self.loss_chunks != 1:
            found["loss_chunks"] = self.loss_chunks
        if self.expert_capacity is not None:
            found["expert_capacity"] = str(self.expert_capacity)
        if self.expert_rows is not None:
            found["expert_rows"] = self.expert_rows
        if self.router_bias_rate:
            found["router_bias_rate"] = self.router_bias_rate
        if self.cuda_graphs:
            found["cuda_graphs"] = True
        if self.chosen or self.optimizer != DEFAULT:
            found["optimizer"] = self.optimizer
        if self.group:
            found["group"] = list(self.group)
        if self.lr is not None:
            found["lr"] = self.lr
        if self.eval_every:
            found["eval_every"] = self.eval_every
        if self.forward_only:
            found["forward_only"] = True
        return found if self.virtual_stages is None else found | {"virtual_stages": self.virtual_stages}

    @property
    def pins(self) -> tuple[Pin, ...]:
        return tuple(Pin.parse(text) for text in self.shard)

    @property
    def for_passes(self) -> dict[str, Any]:
        """The options by the names that passes use."""
        return {
            "pins": self.pins,
            "places": self.places,
            "stage_calls": self.stage_calls,
            "low": LOW.get(self.precision),
            "casts": dict(map(_cast, self.casts)),
            "halves": self.split_backward,
            "budget": self.budget,
            "as_written": self.table is not None,
            "zero": self.zero,
            "zero_axes": self.zero_axes,
            "expert_axes": self.expert_axes,
            "optimizer": self.optimizer,
            "group": self.group,
            "recompute": self.recompute,
            "kernels": self.kernels,
            "bucket": parse_bytes(self.bucket),
            "near": () if self.nodes is None else self.mesh.inside(self.nodes),
            "wire": "" if self.grad_reduce == "fp32" else self.grad_reduce,
            "loss_chunks": self.loss_chunks,
            "expert_capacity": self.expert_capacity,
            "expert_rows": self.expert_rows,
            "router_bias_rate": self.router_bias_rate,
            "compress": "" if self.compress_grads == "none" else self.compress_grads,
            **({"kind": self.schedule} if self.table is None else {"table": self.table}),
        }


@contextmanager
def refused() -> Iterator[None]:
    """Errors of the runtime, as those of a compile."""
    from partc.runtime.errors import UsageError

    try:
        yield
    except UsageError as error:
        raise PartcError(error.code, error.cause, help=error.help) from None


def _optimizer(text: str, group: Sequence[str]) -> str:
    """The optimizer's text with all options checked."""
    from partc.runtime.optimizer.recipe import Recipe

    with refused():
        return str(Recipe.of(text, groups=group))


def _settled(kernels: str) -> str:
    """Resolve `auto`: Triton where this machine has a GPU for it, else PyTorch's kernels."""
    if kernels != "auto":
        return kernels
    import torch

    return "triton" if torch.cuda.is_available() else "aten"


def _stage_calls(given: str | Sequence[int] | None) -> tuple[int, ...]:
    """Parse `9,8*2,9`. Raises PartcError P0421."""
    words = expanded(given, ",") if isinstance(given, str) else [str(number) for number in given or ()]
    if not all(re.fullmatch("[1-9][0-9]{0,5}", word) for word in words):
        raise PartcError(
            "P0421", f"--stage-calls {given} are no numbers of calls", help="for example 9,8,8,9 or 9,8*2,9"
        )
    return tuple(map(int, words))


def _cast(text: str) -> tuple[str, Precision]:
    """Parse `softmax=bf16`: an operation and its precision; `any` follows the operands."""
    name, _, wanted = text.partition("=")
    kinds: Mapping[str, Precision] = {"bf16": "low", "fp16": "low", "fp32": "high", "any": "any"}
    if wanted not in kinds:
        raise PartcError("P0414", f"--cast {text!r} is not OPERATION=TYPE", help="for example --cast softmax=bf16")
    if "::" not in name and name not in operations():
        close = ", ".join(difflib.get_close_matches(name, operations(), 3)) or "see partc inspect"
        raise PartcError("P0414", f"--cast {text}: there is no operation {name!r}", help=f"the nearest: {close}")
    return name, kinds[wanted]


def _zero(text: str, mesh: Mesh) -> tuple[Mesh, int, tuple[str, ...]]:
    """Parse `3`, `3@dp_in` or `3@4`: the stage and the axes it spreads over, by default all that hold weights whole.

    A number of ranks makes an axis of them in the mesh, which is returned.
    """
    level, _, names = text.partition("@")
    if level not in ("0", "1", "2", "3"):
        raise _unknown("ZeRO level", level, ("0", "1", "2", "3"))
    if re.fullmatch("[0-9]{1,7}", names):
        cut, over = mesh.with_span(int(names))
        return cut, int(level), over
    whole = tuple(name for name in mesh.names if holds_weights_whole(name))
    given = tuple(name.strip() for name in names.split(",")) if "@" in text else whole
    for name in given:
        if name not in whole:
            raise PartcError(
                "P0413",
                f"--zero {text} spreads over {name!r}, which is no axis of the batch or the sequence",
                help=f"the mesh {mesh} has {', '.join(whole) or 'none'}",
            )
    return mesh, int(level), given


def _unknown(word: str, given: str, known: Sequence[str]) -> PartcError:
    return PartcError("P0404", f"there is no {word} {given!r}", help=f"choose from {', '.join(known)}")
