"""The user's decisions about a compile, checked."""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from partc.compilation.given_options import COMPRESSIONS, KERNELS, RECORDED, SUMS, GivenOptions
from partc.cost.saved_tensors import parse_bytes
from partc.errors import PartcError
from partc.ir.capacity import Capacity
from partc.ir.mesh import PIPELINE_AXIS, Mesh, holds_weights_whole
from partc.ir.program import PRECISIONS, DType
from partc.rules import Precision, operations
from partc.schedules import SCHEDULES, stage_ranks
from partc.schedules.per_stage import RECOMPUTE, expanded, stage_kinds
from partc.schedules.table import Table, read
from partc.sharding.pins import Pin
from partc.sharding.uses import BatchUse

LOW: Mapping[str, DType] = {"bf16": "bf16", "fp16": "f16"}
DEFAULT = "adamw"  # train.py's own optimizer; importing it from there would import torch
TABLE = "schedule.csv"  # the package's copy of the user's schedule table

_CHOICES: Mapping[str, tuple[str, Sequence[str]]] = {
    "precision": ("precision", PRECISIONS),
    "kernels": ("kind of kernels", KERNELS),
    "grad_reduce": ("type for sums of gradients", SUMS),
    "compress_grads": ("compression", COMPRESSIONS),
}
# option -> (error code, least value, exclusive upper bound, help)
_RANGES: Mapping[str, tuple[str, float, float, str]] = {
    "microbatches": ("P0405", 1, math.inf, "give 1 or more"),
    "loss_chunks": ("P0418", 1, math.inf, "give 1 or more"),
    "router_bias_rate": ("P0004", 0, math.inf, "give 0 or more, such as 1e-3"),
    "seed": ("P0004", 0, 2**32, "give one from 0 to 4294967295"),
    "lr": ("P0004", 0, math.inf, "give a number of 0 or more"),
    "eval_every": ("P0004", 0, math.inf, "give a number of 0 or more"),
    "expert_rows": ("P0004", 1, math.inf, "give a number of 1 or more"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The mesh and the decisions about its use, checked."""

    mesh: Mesh
    microbatches: int
    schedule: str
    virtual_stages: int | None
    table: Table | None  # the contents of the file that `schedule` names
    stage_calls: tuple[int, ...]  # calls of each stage; empty: stages with about the same work
    precision: str
    seed: int
    shard: tuple[str, ...]
    batch_over: str | None
    zero: int
    zero_axes: tuple[str, ...]
    recompute: str
    casts: tuple[str, ...]
    kernels: str  # "auto" is already resolved
    bucket: str
    memory_limit: int | None  # the most bytes that a rank may hold
    nodes: int | None
    expert_axes: tuple[str, ...]
    grad_reduce: str
    compress_grads: str
    loss_chunks: int
    expert_capacity: Capacity | None
    expert_rows: float | None
    router_bias_rate: float
    cuda_graphs: bool
    optimizer: str
    group: tuple[str, ...]
    lr: float | None
    eval_every: int
    forward_only: bool
    chosen: bool  # whether optimizer and group are given; otherwise the model file's optimizer() decides

    @classmethod
    def checked(cls, **fields_given: Any) -> Options:
        """Check the fields of GivenOptions and build the options.

        Raises PartcError P0004, P0101 to P0106, P0108, P0109, P0301, P0305, P0404 to P0414, P0418, P0421 and P0551.
        """
        given = GivenOptions(**fields_given)
        _check_types(given)
        mesh = given.mesh if isinstance(given.mesh, Mesh) else Mesh.parse(given.mesh)
        expert_axes: tuple[str, ...] = ()
        if given.experts is not None:
            mesh, expert_axes = mesh.with_experts(given.experts)
        if given.nodes is not None:
            mesh = mesh.cut_at(given.nodes)
        _check(given)
        table = _table(given, mesh)
        chosen = given.optimizer is not None or bool(given.group)
        optimizer = given.optimizer or DEFAULT
        uses = {use.axis for use in BatchUse.parse(given.batch_over or "", mesh)}
        mesh, level, axes = _zero(str(given.zero), mesh, uses)
        same = {item.name: getattr(given, item.name) for item in fields(cls) if hasattr(given, item.name)}
        decided = {
            "mesh": mesh,
            "schedule": str(given.schedule),
            "table": table,
            "stage_calls": _stage_calls(given.stage_calls),
            "shard": tuple(given.shard),
            "zero": level,
            "zero_axes": axes,
            "casts": tuple(given.casts),
            "kernels": _resolved_kernels(given.kernels),
            "memory_limit": None if given.memory_limit is None else parse_bytes(given.memory_limit),
            "expert_axes": expert_axes or mesh.expert_axes,
            "expert_capacity": None if given.expert_capacity is None else Capacity.parse(str(given.expert_capacity)),
            "optimizer": _optimizer(optimizer, given.group) if chosen else optimizer,
            "group": tuple(given.group),
            "chosen": chosen,
        }
        options = cls(**{**same, **decided})
        options._check_stages(given)
        return options

    def _check_stages(self, given: GivenOptions) -> None:
        """Check that options with a value per stage fit the number of stages. Raises PartcError P0406 and P0421."""
        stages = len(self.places)
        for text, number in (
            (f"--stage-calls {given.stage_calls}", len(self.stage_calls)),
            (f"--recompute {given.recompute}", len(stage_kinds(given.recompute))),
        ):
            if number > 1 and number != stages:
                raise PartcError(
                    "P0421",
                    f"{text} is for {number} stages, and there are {stages}",
                    help="give one for each stage, in the order of the calls; 3*8 stands for eight times 3",
                )

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
        """The options to record in the plan, so that the compile can be repeated."""
        spelled: Mapping[str, object] = {
            "schedule": self.schedule if self.table is None else TABLE,
            "stage_calls": ",".join(map(str, self.stage_calls)) or None,
            "zero": f"{self.zero}@{','.join(self.zero_axes)}" if self.zero_axes and self.zero else str(self.zero),
            "experts": ",".join(self.expert_axes) if self.expert_axes != self.mesh.expert_axes else None,
            "expert_capacity": None if self.expert_capacity is None else str(self.expert_capacity),
            "optimizer": self.optimizer if self.chosen or self.optimizer != DEFAULT else None,
        }
        known = {name: spelled[name] if name in spelled else getattr(self, name) for name in RECORDED}
        told = {name: known[name] for name in known if name in ("schedule", "shard") or known[name] != RECORDED[name]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}

    @property
    def pins(self) -> tuple[Pin, ...]:
        return tuple(Pin.parse(text) for text in self.shard)

    @property
    def batch_uses(self) -> tuple[BatchUse, ...]:
        return BatchUse.parse(self.batch_over or "", self.mesh)

    @property
    def for_passes(self) -> dict[str, Any]:
        """The options under the names that passes use."""
        return {
            "pins": self.pins,
            "batch_over": self.batch_uses,
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
def as_compile_errors() -> Iterator[None]:
    """A context that turns errors of the runtime into errors of a compile."""
    from partc.runtime.errors import UsageError

    try:
        yield
    except UsageError as error:
        raise PartcError(error.code, error.cause, help=error.help) from None


_KINDS = {
    str: "text", int: "a whole number", float: "a number", bool: "True or False", Path: "a path", Mesh: "a Mesh",
    Sequence: "a list",
}  # fmt: skip


@functools.cache
def _kinds() -> Mapping[str, frozenset[type]]:
    """The types that each option may have."""
    hints = get_type_hints(GivenOptions, localns={"Mesh": Mesh})
    members = {name: get_args(hint) if isinstance(hint, UnionType) else (hint,) for name, hint in hints.items()}
    return {name: frozenset(get_origin(kind) or kind for kind in kinds) for name, kinds in members.items()}


def _check_types(given: GivenOptions) -> None:
    """Check that values have the types of their fields. Raises PartcError P0004."""
    for name, kinds in _kinds().items():
        value = getattr(given, name)
        fits = isinstance(value, (*kinds, *([int] if float in kinds else [])))
        if not fits or (isinstance(value, str) and str not in kinds) or (type(value) is bool and bool not in kinds):
            wanted = " or ".join(word for kind, word in _KINDS.items() if kind in kinds)
            raise PartcError("P0004", f"{name} is {value!r}, of the type {type(value).__name__}", help=f"give {wanted}")


def _check(given: GivenOptions) -> None:
    """Check the options that don't depend on the mesh. Raises PartcError P0004, P0108, P0404, P0405, P0414 and
    P0418.
    """
    for name, (word, known) in _CHOICES.items():
        if getattr(given, name) not in known:
            raise _unknown(word, getattr(given, name), known)
    for name, (code, least, below, help) in _RANGES.items():
        value = getattr(given, name)
        if value is not None and not least <= value < below:
            raise PartcError(code, f"--{name.replace('_', '-')} {value} is out of range", help=help)
    if given.router_bias_rate and (given.grad_reduce, given.compress_grads) != ("fp32", "none"):
        raise PartcError(
            "P0108",
            "--router-bias-rate counts rows with the gradients, and numbers of 16 or 8 bits would round the counts",
            help="leave out --grad-reduce and --compress-grads, or --router-bias-rate",
        )
    if parse_bytes(given.bucket) is None:
        raise _unknown("size", given.bucket, ("25MB", "512KiB", "0B"))
    if given.memory_limit is not None and parse_bytes(given.memory_limit) is None:
        raise PartcError(
            "P0004", f"--memory-limit {given.memory_limit} is not a size", help="for example 80GB or 64GiB"
        )
    for kind in stage_kinds(given.recompute) if parse_bytes(given.recompute) is None else ():
        names = kind.split(",")  # the pass checks that they are those of operations or modules
        if kind not in RECOMPUTE and not all(name.isidentifier() and name not in RECOMPUTE for name in names):
            known = (*RECOMPUTE, "a budget such as 18GB", "names of operations or modules")
            raise _unknown("recomputation", kind, known)
    for text in given.shard:
        Pin.parse(text)
    for text in given.casts:
        _cast(text)
    if given.casts and given.precision not in LOW:
        raise PartcError("P0414", f"--cast has no use with --precision {given.precision}", help="add --precision bf16")


def _table(given: GivenOptions, mesh: Mesh) -> Table | None:
    """The user's table of actions, if `schedule` is a file. Raises PartcError P0404, P0406 and the table's errors."""
    schedule = str(given.schedule)
    if not schedule.lower().endswith(".csv"):
        if schedule not in SCHEDULES:
            raise _unknown("schedule", schedule, (*SCHEDULES, "FILE.csv"))
        return None
    table = read(Path(schedule), ranks=mesh.axis(PIPELINE_AXIS), microbatches=given.microbatches)
    if given.virtual_stages is not None:
        raise PartcError("P0406", f"{schedule} already assigns stages to ranks", help="leave out --virtual-stages")
    return table


def _optimizer(text: str, group: Sequence[str]) -> str:
    """The text of the optimizer, after all its options have been checked."""
    from partc.runtime.optimizer.recipe import Recipe

    with as_compile_errors():
        return str(Recipe.of(text, groups=group))


def _resolved_kernels(kernels: str) -> str:
    """Resolve `auto`: Triton if this machine has a suitable GPU, else PyTorch's kernels."""
    if kernels != "auto":
        return kernels
    import torch

    return "triton" if torch.cuda.is_available() else "aten"


def _stage_calls(given: str | Sequence[int] | None) -> tuple[int, ...]:
    """Parse `9,8*2,9`. Raises PartcError P0421."""
    words = expanded(given, ",") if isinstance(given, str) else [str(number) for number in given or ()]
    if not all(re.fullmatch("[1-9][0-9]{0,5}", word) for word in words):
        cause = f"--stage-calls {given} are not numbers of calls"
        raise PartcError("P0421", cause, help="for example 9,8,8,9 or 9,8*2,9")
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


def _zero(text: str, mesh: Mesh, uses: Collection[str]) -> tuple[Mesh, int, tuple[str, ...]]:
    """Parse `3`, `3@dp_in` or `3@4`: the ZeRO stage and its axes, by default all that hold some weights whole.

    Axes in `uses` cut the batch of some calls. Also returns the mesh, which gets a new axis for a number of ranks.
    """
    level, _, names = text.partition("@")
    if level not in ("0", "1", "2", "3"):
        raise _unknown("ZeRO level", level, ("0", "1", "2", "3"))
    if re.fullmatch("[0-9]{1,7}", names):
        cut, over = mesh.with_span(int(names))
        return cut, int(level), over
    whole = tuple(name for name in mesh.names if holds_weights_whole(name) or name in uses)
    given = tuple(name.strip() for name in names.split(",")) if "@" in text else whole
    for name in given:
        if name not in whole:
            raise PartcError(
                "P0413",
                f"--zero {text} spreads over {name!r}, which is not an axis of the batch or the sequence",
                help=f"the mesh {mesh} has {', '.join(whole) or 'none'}",
            )
    return mesh, int(level), given


def _unknown(word: str, given: str, known: Sequence[str]) -> PartcError:
    return PartcError("P0404", f"there is no {word} {given!r}", help=f"choose from {', '.join(known)}")
